#include "tessera/nn/waiting_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"

namespace tessera::nn {

int64_t batches_together(int64_t rows, int64_t in, int64_t out, int64_t batches,
                         at::ScalarType type) {
  constexpr int64_t kFew = 128, kEnough = 512;
  if (rows < 1 || rows > kFew || in < 1 || out < 1 ||
      !uses(Kernel::kWaitingRows)) {
    return 1;
  }
  if (type == at::kHalf &&
      product_way(rows * in * out, type) != ProductWay::kWidened) {
    return 1;
  }
  const int64_t no_more_than_the_gradient = in * out / (in + out);
  const int64_t most = std::min(kEnough, no_more_than_the_gradient) / rows;
  return std::max<int64_t>(1, std::min(most, batches));
}

bool WaitingRows::fit(const at::Tensor& dy, const at::Tensor& x) const {
  return dy.scalar_type() == dy_.scalar_type() &&
         x.scalar_type() == x_.scalar_type() &&
         count_ + dy.size(0) <= dy_.size(0);
}

// The next are taken to be as many.
std::optional<Rows> WaitingRows::add(const at::Tensor& dy,
                                     const at::Tensor& x) {
  const int64_t rows = dy.size(0);
  const int64_t together = dy.is_cpu()
                               ? batches_together(rows, x.size(1), dy.size(1),
                                                  batches_, dy.scalar_type())
                               : 1;
  const bool is_last = ++seen_ >= batches_;
  if (together > 1 && !dy_.defined()) {
    dy_ = at::empty({together * rows, dy.size(1)}, dy.options());
    x_ = at::empty({together * rows, x.size(1)}, x.options());
  }
  std::optional<Rows> now = Rows{dy, x};
  if (together > 1 && fit(dy, x)) {
    dy_.narrow(0, count_, rows).copy_(dy);
    x_.narrow(0, count_, rows).copy_(x);
    count_ += rows;
    const bool is_full = count_ + rows > dy_.size(0);
    now = is_last || is_full ? take() : std::nullopt;
  }
  if (is_last && count_ == 0) reset();
  return now;
}

std::optional<Rows> WaitingRows::take() {
  if (count_ == 0) return std::nullopt;
  const int64_t count = std::exchange(count_, 0);
  return Rows{dy_.narrow(0, 0, count), x_.narrow(0, 0, count)};
}

void WaitingRows::reset() { *this = WaitingRows(batches_); }

}  // namespace tessera::nn
