// Products of bf16 matrices by operands of fp8, each row of which has a scale.
//
// Rule:    a row is divided by its scale, the largest |x| in it / 448, which is
//          e4m3's largest number, and rounded to e4m3, to the nearest. Products
//          of the rounded numbers are summed, times both scales, and rounded to
//          bf16 once.
// Source:  torchao's recipe rowwise_with_gw_hp, in which gradients of weights
//          stay products of bf16; there the weight has one scale for dx, here
//          one for each of dx's columns.
// Devices: GPUs from compute capability 8.9 on, by at::_scaled_mm, whose loops
//          for rows are loops.cu's. Elsewhere the same rounded numbers are
//          multiplied in fp32: to see losses, not to be fast.
// Names:   R rows of K elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

// What the products of a linear layer are made of: its operands as they are, or
// rounded to fp8, forward and for the gradient of its input.
enum class ProductType { kSame, kFp8 };

// Least compute capability, as 89 for 8.9.
inline constexpr int kLeastFp8Capability = 89;

// Whether products with such a weight can be of fp8, for which GPUs ask for
// multiples of 16; of a weight also that it is bf16, and not empty.
constexpr bool takes_fp8(int64_t out, int64_t in) {
  return out % 16 == 0 && in % 16 == 0;
}
bool takes_fp8(const at::Tensor& weight);

struct Fp8Rows {
  at::Tensor values;  // (R, K) of e4m3, contiguous
  at::Tensor scales;  // (R, 1) of fp32
};

// x: (R, K) of bf16. A row without a number other than zero gives zeros; one
// that is not finite gives no numbers.
Fp8Rows fp8_rows(const at::Tensor& x);
// Of the columns of x: (K, R), which are rows of what is given.
// REQUIRES: takes_fp8(x).
Fp8Rows fp8_columns(const at::Tensor& x);

// How far sums of products are rounded on the way, where a GPU has the choice.
enum class Sums { kExact, kFast };

// y = a b^T + bias. a: (N, K), b: (M, K), bias: (M) of bf16, or undefined;
// y: (N, M) of bf16, contiguous.
void fp8_product_into(const at::Tensor& y, const Fp8Rows& a, const Fp8Rows& b,
                      const at::Tensor& bias, Sums sums);

}  // namespace tessera::nn
