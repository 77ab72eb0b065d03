// Whether ranks have the same parameters, and giving them the same values.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::wrappers {

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

// Each once, under its first name: tied ones have several.
std::vector<NamedParameter> parameters_of(const torch::nn::Module& module);
// Each once, where it comes first.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors);
// Those of all its groups.
std::vector<at::Tensor> distinct_parameters(
    const torch::optim::Optimizer& optimizer);

// Throws TS_CHECK where names, shapes or dtypes of some rank are others, or
// which of them require a gradient. Every rank of the group calls it.
void require_same_parameters(const std::vector<NamedParameter>& parameters,
                             comm::Group& group);

// TS_CHECK_CONFIG where ranks of the group hold other parts of the module, to
// which one rank's values would be given: experts of a MoE along ep, shares of
// what parallelize() has cut, or shards that fully_shard() has put there.
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
