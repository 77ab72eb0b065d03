// Facts of a decoder: what its units cost on a place of a mesh, as a pure
// function of configurations. See program/facts.h.
//
// Activations, floating-point operations and collectives are found by going
// through a unit as forward and backward do, with sizes in place of tensors
// (detail/tape.h).
// Routing: of experts even: as many rows for each, from every rank.
// Time:    O(axes) for a mesh of any size; of ring attention O(cp).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model_config.h"
#include "tessera/program/facts.h"

namespace tessera::models {

// A micro-batch, types, and what strategies do to activations.
struct FactsOptions {
  int64_t samples = 1;  // of a micro-batch
  int64_t seq_len = 1;  // of a whole sample
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  bool sequence_parallel = false;
  std::string context_method = "ring";
  int64_t threads = 1;  // of an operator
};

// Of all units, without their parameters: those that strategies place are told
// by parallel/facts.h.
program::Facts facts_of(const ModelConfig& model, const mesh::DeviceMesh& mesh,
                        const mesh::Coord& coord, const FactsOptions& options);

}  // namespace tessera::models
