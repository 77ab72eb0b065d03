// What tensor parallelism does to sizes and activations, as facts: what
// tensor_parallel.h and vocabulary_loss.h do, in the same words.
#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/trace/traced_model.h"
#include "tessera/parallel/tensor/tensor_config.h"

namespace tessera::parallel::tensor {

models::trace::Region traced_region(const mesh::DeviceMesh& mesh,
                                    const TensorConfig& config);

// Of the rank at `coord`.
void apply(models::trace::TracedModel& model, const mesh::DeviceMesh& mesh,
           const mesh::Coord& coord, const TensorConfig& config);

}  // namespace tessera::parallel::tensor
