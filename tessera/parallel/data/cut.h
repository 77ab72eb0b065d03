// How parameters that travel together are cut into one piece a rank: each along
// one dim into chunks of ceil(rows / ranks), uneven and empty ones included,
// the chunks of one rank side by side in its piece.
//
// Shapes: full: a parameter as tensor parallelism left it; piece: (numel()),
//         the same for every rank, with gaps where a chunk is short.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/mesh/layout.h"

namespace tessera::parallel::data {

class Cut {
 public:
  Cut() = default;
  // `dims`: along which each is cut.
  Cut(std::vector<std::vector<int64_t>> full_shapes, std::vector<int64_t> dims,
      int64_t ranks);

  size_t count() const { return full_shapes_.size(); }
  int64_t ranks() const { return ranks_; }
  int64_t numel() const { return numel_; }  // of a piece
  // One parameter, whose rows are the pieces of all ranks one behind the other:
  // it can be gathered and reduced where it lies, in memory for all pieces.
  bool lies_in_pieces() const;
  const std::vector<std::vector<int64_t>>& full_shapes() const {
    return full_shapes_;
  }
  // The rows of full parameter `i` that belong to `rank`.
  at::Tensor rows_of(const at::Tensor& full, size_t i, int64_t rank) const;
  // Where they lie in the piece of `rank`.
  at::Tensor in_piece(const at::Tensor& piece, size_t i, int64_t rank) const;

 private:
  // The chunk of `rank` of full parameter `i`, along its dim.
  mesh::Range chunk(size_t i, int64_t rank) const;
  std::vector<std::vector<int64_t>> full_shapes_;
  std::vector<int64_t> dims_;
  int64_t ranks_ = 1;
  std::vector<int64_t> offsets_;  // in the piece
  int64_t numel_ = 0;
};

}  // namespace tessera::parallel::data
