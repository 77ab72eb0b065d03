// The functions of detail/one_pass.h on a GPU, of the same shapes and rules but
// no fp16; and those for which the CPU's are LibTorch's.
// REQUIRES: runs(x) (program.h), of each tensor's device and type.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "tessera/nn/kernels/kernels.h"

namespace tessera::nn::gpu {

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps, double offset);
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms, double offset, const at::Tensor& past);

// x: (..., D), weight and bias: (D). Gives y, and mean and 1 / deviation of the
// rows, (..., 1) as at::native_layer_norm does.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    double eps);
// The gradients of x, with `past` added where it is defined, weight and bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& means, const at::Tensor& scales, const at::Tensor& past);

// x: (N, D) -> its sum over rows, (D).
at::Tensor column_sums(const at::Tensor& x);

// Fp8Rows of fp8_product.h: of the rows and of the columns of x, of bf16.
std::tuple<at::Tensor, at::Tensor> fp8_rows(const at::Tensor& x);
std::tuple<at::Tensor, at::Tensor> fp8_columns(const at::Tensor& x);

// gradient (E, ...), fp32 += all, or = where it `adds` nothing, of the E groups
// that have rows; ends: (E) of int32, behind which of all rows each one's end.
// Of others nobody has written `all`: their gradient is zero.
void take_groups(const at::Tensor& gradient, const at::Tensor& all,
                 const at::Tensor& ends, bool adds);

at::Tensor add_up_rows(const at::Tensor& rows, const at::Tensor& row,
                       const at::Tensor& weights);
std::tuple<at::Tensor, at::Tensor> add_up_rows_backward(
    const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& row,
    const at::Tensor& weights);
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction, bool in_place);
at::Tensor glu(bool is_silu, const at::Tensor& gate, const at::Tensor& up);
// The gradients lie side by side: columns of one matrix.
std::tuple<at::Tensor, at::Tensor> glu_backward(bool is_silu,
                                                const at::Tensor& gradient,
                                                const at::Tensor& gate,
                                                const at::Tensor& up);
// The sum stays on the device; a target outside the vocabulary makes it NaN.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignored, std::optional<double> scale);

// As detail::drop_there() of drop.h. x: (B, H, T, D), of which samples alone
// may lie apart; past, where it is defined, and y, which may be x, lie as x
// does. mask: that of the first sample and head.
void drop(const at::Tensor& past, const at::Tensor& x, const at::Tensor& y,
          const kernels::Mask& mask, int64_t first_row, int64_t first_column);

}  // namespace tessera::nn::gpu
