// Rows of small micro-batches that wait for those of others, so that a weight's
// gradient is one product of all of them: dW += dy^T x of few rows does little
// but read and write dW.
//
// For:    at most 128 rows of a micro-batch, on a CPU, until they are 512:
//         eight times 64 rows take 1.25 to 1.8 times as long one by one, more
//         than 128 no longer (bench/results/waiting_rows_2core_2026-11-26.md).
// Memory: copies of dy and x; never more numbers than dW has.
// Bits:   sums differ by rounding from those of one micro-batch at a time.
//         Which are multiplied together follows from shapes, their number and
//         when somebody asks for the gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

// Of how many micro-batches, of so many rows and of `batches` in a step, the
// gradients of a weight (out, in) of this type are one product. 1: each is its
// own, as of fp16 where a product is rounded to it: sums of several may not
// fit.
int64_t batches_together(int64_t rows, int64_t in, int64_t out, int64_t batches,
                         at::ScalarType type);

// dy: (N, out), x: (N, in).
struct Rows {
  at::Tensor dy, x;
};

// Of one weight. A layer that is used several times in a micro-batch counts as
// so many of them.
class WaitingRows {
 public:
  explicit WaitingRows(int64_t batches) : batches_(batches) {}

  // One micro-batch's. What is to be multiplied now: these, or those of several
  // with these among them; nothing: they wait.
  std::optional<Rows> add(const at::Tensor& dy, const at::Tensor& x);
  // What waits; nothing: none does.
  std::optional<Rows> take();
  // A new step: what waits is not multiplied.
  void reset();

 private:
  bool fit(const at::Tensor& dy, const at::Tensor& x) const;

  int64_t batches_;
  int64_t seen_ = 0;   // of `batches_`, behind which the memory is let go
  int64_t count_ = 0;  // of rows that wait
  at::Tensor dy_, x_;
};

}  // namespace tessera::nn
