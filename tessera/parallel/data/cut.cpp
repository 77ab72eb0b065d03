#include "tessera/parallel/data/cut.h"

#include <c10/util/accumulate.h>

#include <utility>

#include "tessera/comm/flat_buffer.h"

namespace tessera::parallel::data {

Cut::Cut(std::vector<std::vector<int64_t>> full_shapes,
         std::vector<int64_t> dims, int64_t ranks)
    : full_shapes_(std::move(full_shapes)),
      dims_(std::move(dims)),
      ranks_(ranks) {
  constexpr int64_t kAlignment = comm::FlatBuffer::kAlignment;
  for (size_t i = 0; i < full_shapes_.size(); ++i) {
    auto shape = full_shapes_[i];
    TORCH_INTERNAL_ASSERT(ranks == 1 || !shape.empty(),
                          "a scalar cannot be sharded");
    if (ranks > 1) shape[dims_[i]] = chunk(i, 0).size();
    offsets_.push_back(numel_);
    const int64_t most = c10::multiply_integers(shape);
    numel_ += (most + kAlignment - 1) / kAlignment * kAlignment;
  }
}

bool Cut::lies_in_pieces() const {
  if (ranks_ == 1 || count() != 1 || dims_[0] != 0) return false;
  const int64_t row = c10::multiply_integers(full_shapes_[0].begin() + 1,
                                             full_shapes_[0].end());
  return chunk(0, 0).size() * row == numel_;
}

mesh::Range Cut::chunk(size_t i, int64_t rank) const {
  return mesh::chunk_of(full_shapes_[i][dims_[i]], ranks_, rank);
}

at::Tensor Cut::rows_of(const at::Tensor& full, size_t i, int64_t rank) const {
  const mesh::Range range = chunk(i, rank);
  return full.narrow(dims_[i], range.begin, range.size());
}

at::Tensor Cut::in_piece(const at::Tensor& piece, size_t i,
                         int64_t rank) const {
  auto shape = full_shapes_[i];
  shape[dims_[i]] = chunk(i, rank).size();
  return piece.narrow(0, offsets_[i], c10::multiply_integers(shape))
      .view(shape);
}

}  // namespace tessera::parallel::data
