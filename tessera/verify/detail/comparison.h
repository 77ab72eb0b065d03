// A few steps of a configuration with ranks as threads: recorded, or compared
// with what was recorded of another one.
//
// Comm:   ranks as threads of this process, over shm, as late as can be
//         (late_communicator.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/program/passes/pass.h"
#include "tessera/verify/verify.h"

namespace tessera::verify::detail {

struct Probe {
  int64_t steps = 3;
  // Noise is added to the parameters of this kind (kind_of) before the first
  // step; "": to none.
  std::string nudged = "";
  program::passes::Choice passes = {};  // of the mesh's programs
};

// "blocks.*.attention.o.bias" of "blocks.3.attention.o.bias".
std::string kind_of(const std::string& parameter);

// What one rank computed. By parameter and step: weights before the step and
// gradients; at the end weights and the optimizer's tensors, these as
// "exp_avg.NAME".
struct Control {
  std::vector<double> losses, norms, aux_losses, mtp_losses;
  std::map<std::string, std::vector<at::Tensor>> before, gradients;
  std::map<std::string, at::Tensor> weights, optimizer;
};

// REQUIRES: a completed configuration for one rank, whose programs have no pass
// that must be asked for.
Control record(const engine::RunConfig& config, const Probe& probe);
// Of what differs, what came first: see Verification.
Verification compare(const engine::RunConfig& config, int64_t world_size,
                     const Control& control, const Probe& probe);

}  // namespace tessera::verify::detail
