#include "tessera/engine/reader.h"

namespace tessera::engine {

std::vector<mesh::Axis> axes_of_readers() {
  std::vector<mesh::Axis> axes;
  for (const mesh::Axis axis : mesh::kAxes) {
    if (!mesh::is_of_data(axis)) axes.push_back(axis);
  }
  return axes;
}

bool reads_for_others(const RunConfig& config) {
  return config.data.reader == "first" && !config.mesh.star() &&
         config.mesh.ranks_of_model() > 1;
}

int64_t reader_of(const RunConfig& config, int64_t rank) {
  if (!reads_for_others(config)) return rank;
  const auto mesh = mesh_of(config, implied_world_size(config));
  return mesh.peers(rank, axes_of_readers()).front();
}

comm::Group& group_of_reader(const mesh::DeviceMesh& mesh,
                             comm::Communicator& ranks) {
  return *ranks.make_group(mesh.peers(ranks.rank(), axes_of_readers()),
                           "reader");
}

}  // namespace tessera::engine
