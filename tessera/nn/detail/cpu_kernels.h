// One pass over memory where a chain of tensor operations takes several.
//
// Shapes:  all tensors contiguous, on the CPU, of fp64, fp32 or bf16.
// Types:   arithmetic in fp64 for fp64, else in fp32.
// Bits:    they do not depend on the number of threads.
// Threads: work is shared out by at::parallel_for.
// Vectors: those of the processor (core/vectors.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::nn::detail {

// x: (N, D), weight: (D). Gives y (N, D) and 1 / rms(x) (N), in fp32 or fp64.
std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps);
// The gradients of x and weight.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms);

// x: (B, T, H, E); cos, sin: (T, E/2). `direction` 1 turns on, -1 back.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction);

// silu(gate) * up, of one shape.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
// The gradients of gate and up.
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& gradient,
                                                   const at::Tensor& gate,
                                                   const at::Tensor& up);

// table[ids[i]] += rows[i], in order. table: (R, D), ids: (N) of int64, rows:
// (N, D), of a type that is not wider than the table's.
void add_rows(const at::Tensor& table, const at::Tensor& ids,
              const at::Tensor& rows);

}  // namespace tessera::nn::detail
