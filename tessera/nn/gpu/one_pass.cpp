#include "tessera/nn/gpu/one_pass.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "tessera/nn/gpu/program.h"

namespace tessera::nn::gpu {
std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps, double offset) {
  RECORD_FUNCTION("tessera::rms_norm_forward", {});
  const int64_t width = x.size(-1), rows = x.numel() / width;
  at::Tensor y = at::empty_like(x);
  at::Tensor scales =
      at::empty({rows}, x.options().dtype(at::toOpMathType(x.scalar_type())));
  launch("rms_norm", x, {rows}, x.const_data_ptr(), weight.const_data_ptr(),
         y.mutable_data_ptr(), scales.mutable_data_ptr(), width, eps, offset);
  return {y, scales};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms, double offset, const at::Tensor& past) {
  RECORD_FUNCTION("tessera::rms_norm_backward", {});
  constexpr int64_t kRowsAPart = 256, kMostParts = 65535;
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t rows_a_part =
      std::max(kRowsAPart, (rows + kMostParts - 1) / kMostParts);
  const int64_t parts = (rows + rows_a_part - 1) / rows_a_part;
  at::Tensor dx = at::empty_like(x);
  launch("rms_norm_backward", x, {rows}, gradient.const_data_ptr(),
         x.const_data_ptr(), weight.const_data_ptr(),
         inverse_rms.const_data_ptr(),
         past.defined() ? past.const_data_ptr() : nullptr,
         dx.mutable_data_ptr(), width, offset);
  at::Tensor partial = at::empty({parts, width}, inverse_rms.options());
  launch("rms_norm_weight", x, {(width + kWarp - 1) / kWarp, parts},
         gradient.const_data_ptr(), x.const_data_ptr(),
         inverse_rms.const_data_ptr(), partial.mutable_data_ptr(), rows,
         rows_a_part, width);
  return {dx, partial.sum(0).to(weight.scalar_type())};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction, bool in_place) {
  RECORD_FUNCTION("tessera::rotate", {});
  const int64_t tokens = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  const int64_t pairs = x.numel() / 2;
  at::Tensor y = in_place ? x.variable_data() : at::empty_like(x);
  launch("rotate", x, blocks_for(pairs), x.const_data_ptr(),
         cos.const_data_ptr(), sin.const_data_ptr(), y.mutable_data_ptr(),
         pairs, tokens, heads, half, direction);
  return y;
}

at::Tensor glu(bool is_silu, const at::Tensor& gate, const at::Tensor& up) {
  RECORD_FUNCTION(is_silu ? "tessera::swiglu" : "tessera::geglu", {});
  at::Tensor y = at::empty_like(up);
  launch("glu", up, blocks_for(up.numel()), static_cast<int>(is_silu),
         gate.const_data_ptr(), up.const_data_ptr(), y.mutable_data_ptr(),
         up.numel());
  return y;
}

std::tuple<at::Tensor, at::Tensor> glu_backward(bool is_silu,
                                                const at::Tensor& gradient,
                                                const at::Tensor& gate,
                                                const at::Tensor& up) {
  RECORD_FUNCTION(
      is_silu ? "tessera::swiglu_backward" : "tessera::geglu_backward", {});
  at::Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
  launch("glu_backward", up, blocks_for(up.numel()), static_cast<int>(is_silu),
         gradient.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(),
         dgate.mutable_data_ptr(), dup.mutable_data_ptr(), up.numel());
  return {dgate, dup};
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignored, std::optional<double> scale) {
  RECORD_FUNCTION("tessera::cross_entropy", {});
  const int64_t rows = logits.size(0), width = logits.size(1);
  const at::Tensor losses =
      at::empty({rows}, logits.options().dtype(at::kDouble));
  launch("cross_entropy", logits, {rows}, logits.mutable_data_ptr(),
         targets.const_data_ptr(), ignored, losses.mutable_data_ptr(), width,
         static_cast<int>(scale.has_value()), scale.value_or(0.0));
  return losses.sum();
}

}  // namespace tessera::nn::gpu
