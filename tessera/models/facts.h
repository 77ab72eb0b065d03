// Facts of a decoder: what its units cost on a place of a mesh, as a pure
// function of configurations. See program/facts.h.
//
// Activations, floating-point operations and collectives are found by going
// through a unit as forward and backward do, with sizes in place of tensors
// (detail/tape.h); parameters by their layouts.
// Routing: of experts even: as many rows for each, from every rank.
// Time:    O(axes) for a mesh of any size; of ring attention O(cp).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/layout.h"
#include "tessera/models/model_config.h"
#include "tessera/program/facts.h"

namespace tessera::models {

// What is done with a model: a micro-batch, types and strategies.
struct FactsOptions {
  int64_t samples = 1;  // of a micro-batch
  int64_t seq_len = 1;  // of a whole sample
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  bool sequence_parallel = false;
  std::string context_method = "ring";
  int64_t zero_stage = 0;
  int64_t expert_zero_stage = 0;
  int64_t moments = 2;  // tensors that the optimizer has of each parameter
  int64_t threads = 1;  // of an operator
};

program::Facts facts_of(const ModelConfig& model, const mesh::DeviceMesh& mesh,
                        const mesh::Coord& coord, const FactsOptions& options);

// A parameter of a unit, and where its parts are, as the strategies place it on
// a rank whose stage holds it. `count`: so many alike, of experts.
struct PlacedParameter {
  std::string name;  // inside its unit: "attention.q.weight"
  mesh::Layout layout;
  bool tied = false;
  int64_t count = 1;
};
enum class UnitKind { kEmbedding, kBlock, kGatedBlock, kExperts, kHead };
// A gated block has experts, which are a unit of their own. REQUIRES: a model
// that is complete.
std::vector<PlacedParameter> parameters_of_unit(UnitKind kind,
                                                const ModelConfig& model,
                                                const mesh::DeviceMesh& mesh,
                                                const FactsOptions& options);

}  // namespace tessera::models
