#include "tessera/wrappers/sync_batch_norm.h"

#include <ATen/ATen.h>

#include <vector>

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/nn/wide_type.h"

namespace tessera {

namespace {

// What batch_norm computes in where x is narrower.
at::Tensor widened(const at::Tensor& x) { return x.to(nn::wide_type(x)); }

// Of each channel: all dims but dim 1.
std::vector<int64_t> other_dims(const at::Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// (C) as it lies in x.
at::Tensor by_channel(const at::Tensor& numbers, const at::Tensor& x) {
  std::vector<int64_t> sizes(x.dim(), 1);
  sizes[1] = numbers.size(0);
  return numbers.view(sizes);
}

struct Statistics {
  at::Tensor mean, variance;  // (C)
  at::Tensor count;           // numbers a channel of all ranks, (1)
};

Statistics statistics_of(const at::Tensor& x, comm::Group& ranks) {
  const int64_t channels = x.size(1);
  const auto [variance, mean] =
      at::var_mean(x, other_dims(x), /*correction=*/0);
  const auto mine = at::full({1}, x.numel() / channels, mean.options());
  const auto all = comm::all_gather_with_reduce_scatter(
      at::cat({mean, variance, mine}).unsqueeze(0), /*dim=*/0, ranks);
  const auto means = all.narrow(1, 0, channels);
  const auto variances = all.narrow(1, channels, channels);
  const auto counts = all.narrow(1, 2 * channels, 1).detach();
  const at::Tensor count = counts.sum(0);
  const at::Tensor common = (counts * means).sum(0) / count;
  const at::Tensor spread = variances + (means - common).square();
  return {common, (counts * spread).sum(0) / count, count};
}

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& x) {
  TS_CHECK(x.dim() >= 2 && x.size(1) == options.num_features(),
           "SyncBatchNorm: x is ", x.sizes(), "; it is to be (N, ",
           options.num_features(), ", ...).");
  TS_CHECK(x.numel() > 0, "SyncBatchNorm: x is ", x.sizes(), " on rank ",
           ranks_->rank(),
           ", which has no statistics. Give every rank a sample or more.");
}

// How much of the running statistics this batch is.
double SyncBatchNormImpl::count_batch() {
  if (!is_training() || !options.track_running_stats()) return 0;
  num_batches_tracked += 1;
  if (const auto momentum = options.momentum()) return *momentum;
  return 1.0 / static_cast<double>(num_batches_tracked.item<int64_t>());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  _check_input_dim(x);
  const double share = count_batch();
  if (!is_training() || ranks_->size() == 1) {
    const bool own = is_training() || !options.track_running_stats();
    return at::batch_norm(x, weight, bias, running_mean, running_var, own,
                          share, options.eps(), /*cudnn_enabled=*/true);
  }
  const at::Tensor wide = widened(x);
  const Statistics all = statistics_of(wide, *ranks_);
  if (options.track_running_stats()) {
    const at::NoGradGuard no_grad;
    const at::Tensor unbiased = all.variance * (all.count / (all.count - 1));
    running_mean.lerp_(all.mean.to(running_mean.scalar_type()), share);
    running_var.lerp_(unbiased.to(running_var.scalar_type()), share);
  }
  at::Tensor scale = (all.variance + options.eps()).rsqrt();
  if (options.affine()) scale = scale * weight;
  at::Tensor y = (wide - by_channel(all.mean, x)) * by_channel(scale, x);
  if (options.affine()) y = y + by_channel(widened(bias), x);
  return y.to(x.scalar_type());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", ranks=" << ranks_->size() << ")";
}

}  // namespace tessera
