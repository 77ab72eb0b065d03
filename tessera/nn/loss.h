// Cross-entropy as (sum, weight): whoever has all sums divides once; and the
// head before it, logits = hidden W^T.
//
// Shapes:  logits: (..., V); hidden: (..., D); W: (V, D); targets: (...) of
//          int64; -100 is no target.
// Types:   softmax and sum in fp32, or fp64 for fp64 logits.
// Memory:  where a gradient is asked for, by autograd or by a scale, it takes
//          the place of `logits`: give them up, or pass a clone. There is no
//          second (N, V). head_loss() with a scale has not even one, but for
//          head_rows() of the rows (kernel_choice.h: head_by_rows). Autograd
//          hears that logits change: who kept them for a backward is told.
// Kernel:  on the CPU and on GPUs rows go once through the cache
//          (kernel_choice.h: cross_entropy); else tensor operations, some rows
//          at a time.
// Comm:    none; see SummedLoss.
// Errors:  a target outside [0, V) that is not -100 throws (on the CPU).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace tessera::nn {

struct LossSum {
  at::Tensor sum;     // 0-dim fp64: summed over the target tokens
  at::Tensor weight;  // 0-dim fp64, no gradient: their number
};

// The summed loss of `logits` (N, V) against `targets` (N), of which those of
// `is_target` count. With a `scale` the logits become the gradient of the sum
// times it.
using SummedLoss = std::function<at::Tensor(
    at::Tensor logits, const at::Tensor& targets, const at::Tensor& is_target,
    std::optional<double> scale)>;

// `summed`: another way to the same sum, where the logits are not all here;
// null: of these. With a `scale` nothing is recorded: `logits` are the gradient
// of scale * sum when it returns. REQUIRES: they can be viewed as (N, V) then.
LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets,
                      const SummedLoss& summed = nullptr,
                      std::optional<double> scale = {});

// What makes logits, of which the weight's are here.
struct Head {
  at::Tensor weight;       // W
  SummedLoss summed = {};  // as above
  int64_t columns = 0;     // of the rank that has most of them
};

// The cross-entropy of hidden W^T. With a `scale` `hidden`, which is
// contiguous, is the gradient of scale * sum when it returns, and that of W is
// added to W.grad, if it has one. Without, autograd follows as its mode says.
// Source: Hsu et al. 2024, Liger Kernel, arXiv 2410.10989, section 3.2.
LossSum head_loss(const Head& head, at::Tensor hidden,
                  const at::Tensor& targets, std::optional<double> scale = {});

// Of so many rows, those whose logits are there at once: products go through W
// once for each lot of them. More on a device, which few would leave idle.
int64_t head_rows(int64_t rows, int64_t columns, bool on_cpu = true);

// Rows of so many logits that stay in the cache while several passes go over
// them: as many as SummedLoss should take at once. On a device all.
int64_t rows_at_once(int64_t columns, bool on_cpu = true);

}  // namespace tessera::nn
