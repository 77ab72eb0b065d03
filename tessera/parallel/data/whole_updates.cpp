#include "tessera/parallel/data/whole_updates.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/mesh/slice.h"
#include "tessera/optim/optimizer.h"

namespace tessera::parallel::data {

WholeUpdates::WholeUpdates(const std::vector<Matrix>& matrices,
                           const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks,
                           const at::TensorOptions& numbers)
    : numbers_(numbers) {
  for (const Matrix& matrix : matrices) {
    MatrixPieces pieces = pieces_of(matrix.layout, mesh, ranks.rank());
    if (!pieces.is_cut()) continue;
    auto& bundles = units_[matrix.unit];
    // Of one axis the name that its group has anyway.
    comm::Group* const group =
        ranks.make_group(pieces.ranks, mesh::group_name_of(pieces.axes));
    auto bundle = std::ranges::find(bundles, group, &Bundle::group);
    if (bundle == bundles.end()) {
      bundles.push_back({.group = group});
      bundle = bundles.end() - 1;
    }
    cut_[matrix.parameter] = {
        .unit = matrix.unit,
        .bundle = static_cast<size_t>(bundle - bundles.begin()),
        .matrix = bundle->matrices.size()};
    const int64_t numel = pieces.numel;
    bundle->matrices.push_back(
        {matrix.parameter, std::move(pieces), bundle->numel});
    bundle->numel += numel;
  }
}

void WholeUpdates::begin_gather(int64_t unit, const PieceOf& piece_of,
                                comm::Mode mode) {
  const at::NoGradGuard no_grad;
  for (Bundle& bundle : units_.at(unit)) {
    bundle.sent = comm::zeros(*bundle.group, {bundle.numel}, numbers_);
    bundle.gathered = at::empty({bundle.group->size(), bundle.numel}, numbers_);
    for (const Piece& matrix : bundle.matrices) {
      const at::Tensor piece = piece_of(matrix.parameter);
      bundle.sent.narrow(0, matrix.offset, piece.numel())
          .view(piece.sizes())
          .copy_(piece);
    }
    bundle.work = bundle.group->all_gather(bundle.gathered, bundle.sent, mode);
  }
}

void WholeUpdates::await_gather(int64_t unit) {
  for (Bundle& bundle : units_.at(unit)) {
    std::exchange(bundle.work, {}).wait();
    bundle.sent = at::Tensor();
  }
}

void WholeUpdates::free(int64_t unit) {
  const auto found = units_.find(unit);
  if (found == units_.end()) return;
  for (Bundle& bundle : found->second) bundle.gathered = at::Tensor();
}

const WholeUpdates::Piece& WholeUpdates::at(const Place& place) const {
  return units_.at(place.unit).at(place.bundle).matrices.at(place.matrix);
}

at::Tensor WholeUpdates::whole(size_t parameter) const {
  const at::NoGradGuard no_grad;
  const Place& place = cut_.at(parameter);
  const Bundle& bundle = units_.at(place.unit).at(place.bundle);
  const Piece& matrix = at(place);
  at::Tensor whole = at::empty(matrix.pieces.shape, numbers_);
  for (size_t i = 0; i < matrix.pieces.boxes.size(); ++i) {
    const mesh::Box& box = matrix.pieces.boxes[i];
    mesh::slice(whole, box)
        .copy_(bundle.gathered[static_cast<int64_t>(i)]
                   .narrow(0, matrix.offset, box.numel())
                   .view(box.size));
  }
  return whole;
}

optim::WholePiece WholeUpdates::whole_of(optim::Optimizer& optimizer,
                                         size_t parameter) const {
  if (!gathers(parameter)) return optimizer.piece_as_whole(parameter);
  return {whole(parameter), at(cut_.at(parameter)).pieces.own.offset};
}

}  // namespace tessera::parallel::data
