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
  if (!layout.is_of_expert()) return mesh.axes_of(bundle.peers);
  std::vector<mesh::Axis> summed;
  for (mesh::Axis axis : {layout.replica_axis(), layout.data_axis()}) {
    if (mesh.degree(axis) > 1 && layout.on(axis).summed) summed.push_back(axis);
  }
  return summed.empty() ? mesh::name_of(bundle.axis)
                        : mesh::group_name_of(summed);
}

Cut cut_of(const std::vector<nn::Parameter>& parameters,
           const mesh::DeviceMesh& mesh, int64_t rank, int64_t stage) {
  const mesh::Axis axis = parameters.front().spec->layout.data_axis();
  const int64_t ranks = stage > 0 ? mesh.degree(axis) : 1;
  std::vector<std::vector<int64_t>> full_shapes;
  std::vector<int64_t> dims;
  for (const auto& parameter : parameters) {
    const auto& layout = parameter.spec->layout;
    const Placement own = layout.on(axis);
    TORCH_INTERNAL_ASSERT(ranks == 1 || own.is_shard());
    dims.push_back(own.is_shard() ? own.dim : 0);
    full_shapes.push_back(layout.with(axis, Placement::replicate())
                              .local_shape(mesh, mesh.coord_of(rank)));
  }
  return {std::move(full_shapes), std::move(dims), ranks};
}

}  // namespace

bool travels_alone(const Cut& cut) {
  return cut.lies_in_pieces() && cut.numel() >= kAloneElements;
}

std::vector<Bundle> bundles_of(const std::vector<nn::Parameter>& unit,
                               const mesh::DeviceMesh& mesh, int64_t rank,
                               int64_t stage, bool is_narrow) {
  // Whether they keep a type of their own; the last one tells those apart that
  // travel alone.
  using Key =
      std::tuple<bool, at::ScalarType, bool, std::vector<int64_t>, size_t>;
  std::map<Key, std::vector<nn::Parameter>> by_peers;
  for (size_t i = 0; i < unit.size(); ++i) {
    const bool alone = travels_alone(cut_of({unit[i]}, mesh, rank, stage));
    const nn::ParameterSpec& spec = *unit[i].spec;
    by_peers[{spec.is_frozen, unit[i].tensor.scalar_type(),
              is_narrow && spec.balances_load,
              spec.layout.gradient_peers(mesh, rank), alone ? i + 1 : 0}]
        .push_back(unit[i]);
  }
  std::vector<Bundle> bundles;
  for (auto& [key, parameters] : by_peers) {
    Bundle bundle{.parameters = std::move(parameters), .stage = stage};
    bundle.axis = bundle.parameters.front().spec->layout.data_axis();
    bundle.shards = mesh.peers(rank, {bundle.axis});
    bundle.is_frozen = std::get<0>(key);
    bundle.dtype = std::get<at::ScalarType>(key);
    bundle.peers = std::get<std::vector<int64_t>>(key);
    bundle.peers_name = name_of_peers(bundle, mesh);
    bundle.cut = cut_of(bundle.parameters, mesh, rank, stage);
    bundles.push_back(std::move(bundle));
  }
  return bundles;
}

}  // namespace tessera::parallel::data
