#include "tessera/parallel/compose.h"

#include <utility>

namespace tessera::parallel {

using mesh::Axis;

Composed compose(torch::nn::Module& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options) {
  Composed composed;
  composed.mesh = mesh;
  composed.coord = mesh.coord_of(ranks.rank());

  // 1. Memory last of all that shapes parameters: every rank allocates and
  //    fills its own boxes, and none ever holds more.
  nn::materialise(model, mesh, composed.coord, options.materialise);
  composed.parameters = nn::parameters_of(model);

  // 2. Data parallelism outermost: it reduces whatever gradients the layers
  //    above it left on this rank. At degree 1 it sums nothing, and the same
  //    buffers serve.
  composed.data = ranks.make_group(
      mesh.peers(ranks.rank(), {Axis::kDpReplicate, Axis::kDpShard}), "dp");
  std::vector<data::NamedParameter> named;
  for (const auto& parameter : composed.parameters) {
    named.push_back({parameter.name, parameter.tensor});
  }
  composed.reducer = std::make_unique<data::GradientReducer>(
      std::move(named), *composed.data,
      data::ReducerOptions{.bucket_bytes = options.bucket_bytes,
                           .overlap = options.overlap});
  return composed;
}

}  // namespace tessera::parallel
