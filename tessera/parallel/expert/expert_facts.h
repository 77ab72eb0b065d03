// What expert parallelism does to sizes and activations, as facts: what
// expert_parallel.h does, in the same words.
#pragma once

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/trace/traced_model.h"

namespace tessera::parallel::expert {

// As ExpertOptions.
struct TracedOptions {
  std::vector<mesh::Axis> sample_axes = {};
  bool sequence_parallel = false;
  models::trace::Region region = {};
  // That come to the experts of this rank, over those that it sends.
  double received_rows = 1;
  int64_t dispatch_chunks = 0;
};

// Of the rank at `coord`.
void apply(models::trace::TracedModel& model, const TracedOptions& options,
           const mesh::DeviceMesh& mesh, const mesh::Coord& coord);

}  // namespace tessera::parallel::expert
