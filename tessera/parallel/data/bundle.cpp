#include "tessera/parallel/data/bundle.h"

#include <map>
#include <tuple>
#include <utility>

namespace tessera::parallel::data {
namespace {

using mesh::Placement;

std::string name_of_peers(const Bundle& bundle, const mesh::DeviceMesh& mesh) {
  if (bundle.peers.size() == 1) return "self";
  const auto& layout = bundle.parameters.front().spec->layout;
  return layout.is_of_expert() ? mesh::name_of(bundle.axis)
                               : mesh.axes_of(bundle.peers);
}

Cut cut_of(const Bundle& bundle, const mesh::DeviceMesh& mesh, int64_t rank) {
  std::vector<std::vector<int64_t>> full_shapes;
  std::vector<int64_t> dims;
  for (const auto& parameter : bundle.parameters) {
    const auto& layout = parameter.spec->layout;
    const Placement own = layout.on(bundle.axis);
    TORCH_INTERNAL_ASSERT(!bundle.is_sharded() || own.is_shard());
    dims.push_back(own.is_shard() ? own.dim : 0);
    full_shapes.push_back(layout.with(bundle.axis, Placement::replicate())
                              .local_shape(mesh, mesh.coord_of(rank)));
  }
  const auto ranks = static_cast<int64_t>(bundle.shards.size());
  return {std::move(full_shapes), std::move(dims),
          bundle.is_sharded() ? ranks : 1};
}

}  // namespace

std::vector<Bundle> bundles_of(const std::vector<nn::Parameter>& unit,
                               const mesh::DeviceMesh& mesh, int64_t rank,
                               int64_t stage) {
  using Key = std::tuple<bool, at::ScalarType, std::vector<int64_t>>;
  std::map<Key, std::vector<nn::Parameter>> by_peers;
  for (const auto& parameter : unit) {
    by_peers[{parameter.spec->is_frozen, parameter.tensor.scalar_type(),
              parameter.spec->layout.gradient_peers(mesh, rank)}]
        .push_back(parameter);
  }
  std::vector<Bundle> bundles;
  for (auto& [key, parameters] : by_peers) {
    Bundle bundle{.parameters = std::move(parameters), .stage = stage};
    bundle.axis = bundle.parameters.front().spec->layout.data_axis();
    bundle.shards = mesh.peers(rank, {bundle.axis});
    bundle.is_frozen = std::get<bool>(key);
    bundle.dtype = std::get<at::ScalarType>(key);
    bundle.peers = std::get<std::vector<int64_t>>(key);
    bundle.peers_name = name_of_peers(bundle, mesh);
    bundle.cut = cut_of(bundle, mesh, rank);
    bundles.push_back(std::move(bundle));
  }
  return bundles;
}

}  // namespace tessera::parallel::data
