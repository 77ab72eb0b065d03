// Whether ranks have the same parameters, and giving them the same values.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::wrappers {

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

// Throws TS_CHECK where names, shapes or dtypes of some rank are others. Every
// rank of the group calls it.
void require_same_parameters(const std::vector<NamedParameter>& parameters,
                             comm::Group& group);

// TS_CHECK_CONFIG where ranks of the group hold other parts of the module, to
// which one rank's values would be given: experts of a MoE along ep, or shares
// of what parallelize() has cut.
void require_no_parts(torch::nn::Module& module, const comm::Group& group);

// TS_CHECK_CONFIG where a mean over ranks that hold the same leaves gradients
// of experts out: of a MoE that other ranks with other tokens share too.
void require_whole_gradients(torch::nn::Module& module);

// Of a module of which a rank is to join() the others without data of its own:
// TS_CHECK where a SyncBatchNorm waits for every rank's forward, or biases of a
// MoE move by every rank's load.
void require_joinable(torch::nn::Module& module);

// The values of `root`, on every rank.
void broadcast_all(const std::vector<at::Tensor>& tensors, comm::Group& group,
                   int64_t root);

}  // namespace tessera::wrappers
