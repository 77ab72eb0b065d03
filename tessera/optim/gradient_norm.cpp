#include "tessera/optim/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>

namespace tessera::optim {
namespace {

// Several running sums, so that additions do not wait for each other.
constexpr int64_t kLanes = 16;

template <typename T>
double sum_of_squares_of(const T* values, int64_t size) {
  std::array<double, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(values[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (; i < size; ++i) {
    const double value = static_cast<double>(values[i]);
    sums[i % kLanes] += value * value;
  }
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

double sum_of_squares_here(const at::Tensor& gradient) {
  const at::Tensor flat = gradient.detach().contiguous();
  double sum = 0.0;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, flat.scalar_type(), "sum_of_squares", [&] {
        sum = sum_of_squares_of(flat.const_data_ptr<scalar_t>(), flat.numel());
      });
  return sum;
}

}  // namespace

at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients) {
  if (gradients.empty() || gradients.front().is_cpu()) {
    double sum = 0.0;
    for (const at::Tensor& gradient : gradients) {
      sum += sum_of_squares_here(gradient);
    }
    return at::scalar_tensor(sum, at::kDouble);
  }
  at::Tensor sum =
      at::zeros({}, gradients.front().options().dtype(at::kDouble));
  for (const at::Tensor& gradient : gradients) {
    sum = sum + gradient.detach().to(at::kDouble).square().sum();
  }
  return sum;
}

double clip_scale(double norm, double clip_norm) {
  if (clip_norm == 0.0) return 1.0;
  return std::min(1.0, clip_norm / (norm + 1e-6));
}

void scale_gradients(const std::vector<at::Tensor>& gradients, double scale) {
  if (scale == 1.0 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  at::_foreach_mul_(gradients, scale);
}

}  // namespace tessera::optim
