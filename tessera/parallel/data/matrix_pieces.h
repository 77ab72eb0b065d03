// Where the pieces of a matrix that is updated whole lie: on the ranks along
// the axes that cut it, tensor parallelism's and ZeRO's alike. Of stacked
// experts each rank puts those together that it has a part of.
//
// A pure function of a layout, for any rank of the mesh: the storage of a rank
// (whole_updates.h), the proof of all programs and facts read the same.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/layout.h"

namespace tessera::parallel::data {

// What the optimizer asks for.
struct UpdateOptions {
  bool whole_matrices = false;        // hidden ones, to be updated
  at::ScalarType dtype = at::kFloat;  // of their pieces, and of the products
  int64_t steps = 5;  // of products that bring one near to orthogonal ones
};

struct MatrixPieces {
  std::vector<mesh::Axis> axes;  // none: the rank has all of it
  std::vector<int64_t> ranks;    // that have a piece, ascending
  std::vector<int64_t> shape;    // of the whole
  // By rank of `ranks`, and of this rank: where its piece lies in the whole.
  std::vector<mesh::Box> boxes;
  mesh::Box own;
  int64_t numel = 0;  // of the largest piece, as which all travel

  bool is_cut() const { return !axes.empty(); }
};

MatrixPieces pieces_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                       int64_t rank);

}  // namespace tessera::parallel::data
