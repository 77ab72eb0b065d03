#include "tessera/nn/rotary.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "tessera/nn/detail/cpu_kernels.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// The rotation as tensor operations, for devices other than the CPU.
at::Tensor rotated_by_tensors(const at::Tensor& x, const Rotation& rotation,
                              double direction) {
  const at::Tensor cos = rotation.cos.unsqueeze(1);  // (T, 1, E/2)
  const at::Tensor sin = rotation.sin.unsqueeze(1) * direction;
  const auto halves = x.to(cos.scalar_type()).chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin,
                  halves[1] * cos + halves[0] * sin},
                 -1)
      .to(x.scalar_type());
}

// x: (B, T, H, E). `direction` -1 rotates back.
at::Tensor rotated(const at::Tensor& x, const Rotation& rotation,
                   double direction) {
  if (!x.is_cpu()) return rotated_by_tensors(x, rotation, direction);
  return detail::rotate(x.contiguous(), rotation.cos, rotation.sin, direction);
}

class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    ctx->saved_data["cos"] = cos;
    ctx->saved_data["sin"] = sin;
    return rotated(x, {cos, sin}, 1.0);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    const Rotation rotation{ctx->saved_data["cos"].toTensor(),
                            ctx->saved_data["sin"].toTensor()};
    return {rotated(gradients[0], rotation, -1.0), {}, {}};
  }
};

}  // namespace

Rotation RotaryTable::rows(int64_t begin, int64_t length,
                           const at::Tensor& like) {
  const auto type = wide_type(like);
  const auto options = like.options().dtype(type).requires_grad(false);
  const bool fits = all_ && all_.cos.size(0) >= begin + length &&
                    all_.cos.scalar_type() == type &&
                    all_.cos.device() == like.device();
  if (!fits) grow(begin + length, options);
  return {all_.cos.narrow(0, begin, length), all_.sin.narrow(0, begin, length)};
}

void RotaryTable::grow(int64_t positions, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  const auto wide = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor exponents =
      at::arange(0, head_dim_, 2, wide) / static_cast<double>(head_dim_);
  const at::Tensor frequencies = at::exp(exponents * -std::log(theta_));
  const at::Tensor angles = at::outer(at::arange(positions, wide), frequencies);
  all_ = {angles.cos().to(options), angles.sin().to(options)};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  return Rotate::apply(x, rotation.cos, rotation.sin);
}

}  // namespace tessera::nn
