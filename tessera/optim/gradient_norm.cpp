#include "tessera/optim/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/parallel.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/optim/detail/kernel_table.h"

namespace tessera::optim {
namespace {

constexpr double kEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_'s

// Parts of all tensors, which threads share; sums of parts are added up in
// order.
double sum_of_squares_here(const std::vector<at::Tensor>& gradients) {
  struct Range {
    size_t tensor;
    int64_t first, count;
  };
  std::vector<at::Tensor> flat;
  std::vector<Range> parts;
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor of = gradient.detach().contiguous();
    flat.push_back(of);
    for (int64_t i = 0; i < of.numel(); i += detail::kElementsPerPart) {
      parts.push_back({flat.size() - 1, i,
                       std::min(detail::kElementsPerPart, of.numel() - i)});
    }
  }
  std::vector<double> sums(parts.size());
  const auto size = static_cast<int64_t>(parts.size());
  parallel_for(0, size, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [tensor, first, count] = parts[i];
      const at::Tensor& of = flat[tensor];
      const auto* const from = static_cast<const char*>(of.const_data_ptr()) +
                               first * static_cast<int64_t>(of.itemsize());
      sums[i] = detail::table().squares(detail::type_of(of), from, count);
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// Of a device's tensors, where it stays: parts of all of them, then one sum.
at::Tensor sum_of_squares_there(const std::vector<at::Tensor>& gradients) {
  const auto options = gradients.front().options().dtype(at::kDouble);
  if (!std::ranges::all_of(gradients, nn::gpu::runs)) {
    at::Tensor sum = at::zeros({}, options);
    for (const at::Tensor& gradient : gradients) {
      sum = sum + gradient.detach().to(at::kDouble).square().sum();
    }
    return sum;
  }
  int64_t blocks = 0;
  for (const at::Tensor& gradient : gradients) {
    blocks += nn::gpu::blocks_for(gradient.numel());
  }
  const at::Tensor parts = at::empty({blocks}, options);
  auto* part = parts.mutable_data_ptr<double>();
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor of = gradient.detach().contiguous();
    const int64_t own = nn::gpu::blocks_for(of.numel());
    nn::gpu::launch("squares", of, own, of.const_data_ptr(), part, of.numel());
    part += own;
  }
  return parts.sum();
}

}  // namespace

at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients) {
  if (gradients.empty() || gradients.front().is_cpu()) {
    return at::scalar_tensor(sum_of_squares_here(gradients), at::kDouble);
  }
  return sum_of_squares_there(gradients);
}

double clip_scale(double norm, double clip_norm) {
  if (clip_norm == 0.0) return 1.0;
  return std::min(1.0, clip_norm / (norm + kEpsilon));
}

at::Tensor clip_scale_there(const at::Tensor& squares, double factor,
                            double clip_norm) {
  const at::Tensor norm = squares.sqrt() * factor;
  // NaN, unless the norm is a number that has an end.
  const at::Tensor none = norm - norm;
  if (clip_norm == 0.0) return none + 1;
  return (clip_norm / (norm + kEpsilon)).clamp_max_(1).add_(none);
}

double normalize_scale(double norm, double clip_norm) {
  const double scale = 1.0 / (norm + kEpsilon);
  return clip_norm < 1.0 ? scale * clip_scale(norm * scale, clip_norm) : scale;
}

void scale_gradients(const std::vector<at::Tensor>& gradients, double scale) {
  if (scale == 1.0 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  at::_foreach_mul_(gradients, scale);
}

}  // namespace tessera::optim
