// Facts of a unit's parameters: what ShardedParameters holds, gathers and
// reduces of them, without a rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/program/facts.h"

namespace tessera::parallel::data {

struct StateOptions {
  int64_t zero_stage = 0;  // 0 where nobody shares
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  int64_t moments = 2;  // tensors that the optimizer has of each parameter
};

// Of a rank that holds them all, whichever stages do.
std::vector<program::ParameterFacts> parameter_facts(
    const std::vector<const nn::ParameterSpec*>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const StateOptions& options);

}  // namespace tessera::parallel::data
