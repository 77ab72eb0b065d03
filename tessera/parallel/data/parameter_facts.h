// Facts of a unit's parameters: what ShardedParameters holds, gathers and
// reduces of them, without a rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/data/matrix_pieces.h"
#include "tessera/program/facts.h"
#include "tessera/program/units.h"

namespace tessera::parallel::data {

// What an optimizer keeps of each parameter, beside a master of half precision.
struct KeptStates {
  int64_t moments = 2;         // tensors
  int64_t matrix_moments = 2;  // of those that are updated whole
  // Of moments; none: the master's.
  std::optional<at::ScalarType> dtype = {};
  bool average = false;  // one tensor more, as the master is
};

struct StateOptions {
  int64_t zero_stage = 0;  // as zero_stage_of()
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  // Of shards, where gathers round them; none: compute's.
  std::optional<at::ScalarType> shard = {};
  KeptStates kept = {};
  UpdateOptions updates = {};
  int64_t num_units = 0;  // of the model
  program::Versions versions = {};
  // Shards are the host's, what is gathered a device's.
  bool crosses = false;
  // Every stage is there twice: all gradients are summed over its two ranks.
  bool two_replicas = false;
};

// Of a rank that holds them all, whichever stages do.
std::vector<program::ParameterFacts> parameter_facts(
    const std::vector<const nn::ParameterSpec*>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const StateOptions& options);

}  // namespace tessera::parallel::data
