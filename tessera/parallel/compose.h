// Applies every kind of parallelism to a model, in one order. Nothing else
// knows which of them are in force: from here on the layouts speak.
//
// Comm:   none here; what is installed communicates during steps.
// Errors: a pair that cannot go together is TS_CHECK_CONFIG with both keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/data/gradient_reducer.h"

namespace tessera::parallel {

struct ComposeOptions {
  nn::MaterialiseOptions materialise;
  int64_t bucket_bytes = int64_t{25} << 20;
  bool overlap = true;
};

// A model on this rank's place of the mesh, ready to train.
struct Composed {
  mesh::DeviceMesh mesh;
  mesh::Coord coord;
  std::vector<nn::Parameter> parameters;  // local boxes
  comm::Group* data = nullptr;            // ranks that see other samples
  std::unique_ptr<data::GradientReducer> reducer;
};

Composed compose(torch::nn::Module& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options);

}  // namespace tessera::parallel
