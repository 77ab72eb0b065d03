#include "tessera/nn/rotary.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// The rotation as tensor operations, where there is no loop for it or it is
// itself recorded.
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

// Loops go by these sizes unasked.
void check_rotation(const at::Tensor& x, const Rotation& rotation) {
  const auto fits = [&](const at::Tensor& angles) {
    return angles.dim() == 2 && angles.size(0) == x.size(1) &&
           2 * angles.size(1) == x.size(3) && angles.is_contiguous() &&
           angles.scalar_type() == wide_type(x) &&
           angles.device() == x.device();
  };
  TS_CHECK(x.dim() == 4 && fits(rotation.cos) && fits(rotation.sin),
           "a rotation by angles of ", rotation.cos.scalar_type(), " ",
           rotation.cos.sizes(), " on ", rotation.cos.device(), " is not for ",
           x.scalar_type(), " ", x.sizes(), " on ", x.device(), ".");
}

// x: (B, T, H, E). `direction` -1 rotates back.
at::Tensor rotated(const at::Tensor& x, const Rotation& rotation,
                   double direction, bool in_place) {
  if (!detail::has_loops(x)) return rotated_by_tensors(x, rotation, direction);
  const at::Tensor rows = x.contiguous();
  return detail::rotate(rows, rotation.cos, rotation.sin, direction,
                        in_place || !rows.is_same(x));
}

// Of a gradient that LibTorch handed in.
bool is_ours_alone(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.storage().use_count() == 1;
}

class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, bool in_place) {
    ctx->saved_data["cos"] = cos;
    ctx->saved_data["sin"] = sin;
    return rotated(x, {cos, sin}, 1.0, in_place);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    const Rotation rotation{ctx->saved_data["cos"].toTensor(),
                            ctx->saved_data["sin"].toTensor()};
    if (at::GradMode::is_enabled()) {
      return {rotated_by_tensors(gradients[0], rotation, -1.0), {}, {}, {}};
    }
    const bool in_place = is_ours_alone(gradients[0]);
    return {rotated(gradients[0], rotation, -1.0, in_place), {}, {}, {}};
  }
};

// Of dim `i`, shorter waves keep their frequency, longer ones are stretched.
at::Tensor llama3_frequencies(const at::Tensor& plain,
                              const RopeScaling& scaling) {
  const auto length = static_cast<double>(scaling.original_length);
  const at::Tensor rotations = plain * (length / (2 * M_PI));
  const at::Tensor kept = ((rotations - scaling.low_freq_factor) /
                           (scaling.high_freq_factor - scaling.low_freq_factor))
                              .clamp(0, 1);
  return plain * kept + plain / scaling.factor * (1 - kept);
}

at::Tensor yarn_frequencies(const at::Tensor& plain, double theta,
                            const RopeScaling& scaling) {
  const int64_t dims = plain.numel();
  // The dim that turns so often over the original length.
  const auto dim_of = [&](double rotations) {
    const double wave =
        static_cast<double>(scaling.original_length) / (rotations * 2 * M_PI);
    return static_cast<double>(dims) * std::log(wave) / std::log(theta);
  };
  double low = dim_of(scaling.beta_fast), high = dim_of(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(2 * dims - 1));
  if (low == high) high += 0.001;
  const at::Tensor stretched =
      ((at::arange(dims, plain.options()) - low) / (high - low)).clamp(0, 1);
  return plain * (1 - stretched) + plain / scaling.factor * stretched;
}

}  // namespace

at::Tensor rotary_frequencies(int64_t dim, double theta,
                              const RopeScaling& scaling) {
  const at::Tensor exponents =
      at::arange(0, dim, 2, at::TensorOptions().dtype(at::kDouble)) /
      static_cast<double>(dim);
  const at::Tensor plain = at::exp(exponents * -std::log(theta));
  switch (scaling.kind) {
    case RopeScaling::Kind::kNone:
      return plain;
    case RopeScaling::Kind::kLinear:
      return plain / scaling.factor;
    case RopeScaling::Kind::kLlama3:
      return llama3_frequencies(plain, scaling);
    case RopeScaling::Kind::kYarn:
      return yarn_frequencies(plain, theta, scaling);
  }
  TORCH_INTERNAL_ASSERT(false, "no such scaling");
}

Rotation RotaryTable::rows(int64_t begin, int64_t length,
                           const at::Tensor& like) {
  const auto type = wide_type(like);
  const auto options = like.options().dtype(type).requires_grad(false);
  const int64_t needed = begin + length, size = all_ ? all_.cos.size(0) : 0;
  const bool is_alike = all_ && all_.cos.scalar_type() == type &&
                        all_.cos.device() == like.device();
  if (!is_alike || size < needed) {
    // Who asks for one position goes on to the next. What a training step asks
    // for it gets, and no more: models/trace counts it.
    const bool doubles = length == 1 && size < needed;
    grow(doubles ? std::max(needed, 2 * size) : needed, options);
  }
  return {all_.cos.narrow(0, begin, length), all_.sin.narrow(0, begin, length)};
}

void RotaryTable::grow(int64_t positions, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor frequencies = rotary_frequencies(dim_, theta_, scaling_);
  const at::Tensor angles =
      at::outer(at::arange(positions, frequencies.options()), frequencies);
  const double factor = scaling_.attention_factor;
  all_ = {(angles.cos() * factor).to(options),
          (angles.sin() * factor).to(options)};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  check_rotation(x, rotation);
  return Rotate::apply(x, rotation.cos, rotation.sin, /*in_place=*/false);
}

at::Tensor rotate_in_place(const at::Tensor& x, const Rotation& rotation) {
  check_rotation(x, rotation);
  return Rotate::apply(x, rotation.cos, rotation.sin, /*in_place=*/true);
}

}  // namespace tessera::nn
