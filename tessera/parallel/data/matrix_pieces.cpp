#include "tessera/parallel/data/matrix_pieces.h"

#include <algorithm>

#include "tessera/mesh/slice.h"

namespace tessera::parallel::data {

using mesh::Axis;
using mesh::Placement;

MatrixPieces pieces_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                       int64_t rank) {
  MatrixPieces pieces;
  // Along ep there are whole experts.
  const std::vector<Axis> cuts = layout.is_of_expert()
                                     ? std::vector{Axis::kExpertDp, Axis::kEtp}
                                     : std::vector{Axis::kDpShard, Axis::kTp};
  mesh::Layout together = layout;
  for (Axis axis : cuts) {
    const Placement placement = layout.on(axis);
    if (!placement.is_shard() || mesh.degree(axis) <= placement.copies) {
      continue;
    }
    pieces.axes.push_back(axis);
    together = together.with(axis, Placement::replicate());
  }
  const mesh::Box whole = together.local_box(mesh, mesh.coord_of(rank));
  pieces.shape = whole.size;
  pieces.ranks = pieces.is_cut() ? mesh.peers(rank, pieces.axes)
                                 : std::vector<int64_t>{rank};
  for (int64_t peer : pieces.ranks) {
    pieces.boxes.push_back(
        mesh::relative(layout.local_box(mesh, mesh.coord_of(peer)), whole));
    pieces.numel = std::max(pieces.numel, pieces.boxes.back().numel());
    if (peer == rank) pieces.own = pieces.boxes.back();
  }
  return pieces;
}

}  // namespace tessera::parallel::data
