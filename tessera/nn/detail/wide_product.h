// Products of narrow matrices through fp32: kernels/wide_product.inc by this
// rank's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/nn/kernels/kernels.h"

namespace tessera::nn::detail {

// y = a b, or y += a b: sums in fp32, rounded once. a: (N, K), b: (K, M), of
// fp32, bf16 or fp16, each a matrix or its transpose; y: (N, M), rows
// contiguous, of their type or fp32. The bits are the same by any number of
// threads.
void wide_product(const kernels::Kernels& by, const at::Tensor& y,
                  const at::Tensor& a, const at::Tensor& b, bool adds);

// Numbers of fp32 that it holds meanwhile, for a: (rows, in), b: (in, out).
int64_t wide_product_numbers(int64_t rows, int64_t in, int64_t out,
                             bool into_wide, int64_t threads);

}  // namespace tessera::nn::detail
