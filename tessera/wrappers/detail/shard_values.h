// The values that the parameters of a user's module begin with, on the ranks
// that hold a part of each.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera::wrappers {

// Leaves of each parameter the box that its layout gives this rank, with the
// values of the first of the ranks that have the same: of `data`, or of those
// that hold the same expert. Buffers are those of rank 0.
// Comm:    a comparison of names and shapes over `data`, and broadcasts.
// Errors:  TS_CHECK_CONFIG for other modules on other ranks, for gradients that
//          are there, for parameters without values.
void take_values(torch::nn::Module& module,
                 const std::vector<nn::Parameter>& parameters,
                 const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
                 comm::Group& data, const FullyShardOptions& options);

}  // namespace tessera::wrappers
