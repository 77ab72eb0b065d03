// What context parallelism does to sizes and activations, as facts: what
// context_parallel.h does, in the same words.
#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/trace/traced_model.h"
#include "tessera/parallel/context/context_config.h"

namespace tessera::parallel::context {

// Of the rank at `coord`.
void apply(models::trace::TracedModel& model, const mesh::DeviceMesh& mesh,
           const mesh::Coord& coord, const ContextConfig& config);

}  // namespace tessera::parallel::context
