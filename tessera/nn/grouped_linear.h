// Linear layers that are stacked, each of which has rows of its own.
//
// Shapes: rows: (N, in), those of the first layer, then of the next; weight:
//         (E, out, in) -> (N, out).
// Kernel: one product for each layer, as matmul.h multiplies them; the threads
//         of a rank share rows out (of a weight's gradient its output
//         features), so that all end together, whichever layers have them. On a
//         GPU from Hopper on, of bf16, at::_grouped_mm: one kernel for all,
//         which reads there whose rows are whose, where a product of a size
//         that cuBLAS has not met costs it a third of a millisecond to choose
//         for; a weight's gradient is then rounded to bf16 before it is added,
//         as LibTorch's own is.
// Empty:  a layer without a row has a zero gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/nn/blocks.h"

namespace tessera::nn {

// How many rows each layer has. What a device has counted the host reads where
// it needs the numbers, and once. Copies share what is known.
// Threads: one at a time.
class RowGroups {
 public:
  explicit RowGroups(std::vector<int64_t> sizes);
  // counts: (E) of int64, which add up to `rows`, where the host knows it.
  RowGroups(const at::Tensor& counts, std::optional<int64_t> rows);

  // Both may block until the device has counted.
  int64_t rows() const;
  const std::vector<int64_t>& sizes() const;
  // Behind which of all rows each layer's end: (E) of int32.
  const at::Tensor& ends_on(at::Device device) const;

 private:
  struct Known;
  std::shared_ptr<Known> known_;
};

// For autograd: y = x W_e^T for the rows x of each layer e in turn.
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight,
                           const RowGroups& groups);

class GroupedLinear : public Block {
 public:
  GroupedLinear(int64_t experts, const LinearOptions& options);
  at::Tensor forward(const at::Tensor& rows, const RowGroups& groups) const {
    return grouped_product(rows, weight_, groups);
  }
  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};

}  // namespace tessera::nn
