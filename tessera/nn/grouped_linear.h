// Linear layers that are stacked, each of which has rows of its own.
//
// Shapes: rows: (N, in), those of the first layer, then of the next; weight:
//         (E, out, in) -> (N, out).
// Kernel: one product for each layer, as matmul.h multiplies them; the threads
//         of a rank share rows out (of a weight's gradient its output
//         features), so that all end together, whichever layers have them. On a
//         GPU, of bf16, at::_grouped_mm: one kernel for all, where a product of
//         a size that cuBLAS has not met costs it a third of a millisecond to
//         choose for; a weight's gradient is then rounded to bf16 before it is
//         added, as LibTorch's own is.
// Empty:  a layer without a row has a zero gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/nn/blocks.h"

namespace tessera::nn {

// For autograd: y = x W_e^T for the rows x of each layer e in turn, `splits[e]`
// of them.
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight,
                           const std::vector<int64_t>& splits);

class GroupedLinear : public Block {
 public:
  GroupedLinear(int64_t experts, const LinearOptions& options);
  at::Tensor forward(const at::Tensor& rows,
                     const std::vector<int64_t>& splits) const {
    return grouped_product(rows, weight_, splits);
  }
  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};

}  // namespace tessera::nn
