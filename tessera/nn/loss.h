// Cross-entropy as (sum, weight): whoever has all sums divides once.
//
// Shapes:  logits: (..., V); targets: (...) of int64; -100 is no target.
// Types:   softmax and sum in fp32, or fp64 for fp64 logits.
// Memory:  while gradients are recorded, `logits` is overwritten with its own
//          gradient: give it up, or pass a clone. There is no second (N, V).
// Comm:    none, or with a VocabularyShard two all_reduces over its group: of
//          the maxima, and of the sums of exponentials and targets' logits.
//          Every rank gets the whole sum, and the gradient of its own logits.
// Errors:  a target outside [0, V) that is not -100 throws (on the CPU).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/group.h"

namespace tessera::nn {

inline constexpr int64_t kIgnoreIndex = -100;

struct LossSum {
  at::Tensor sum;     // 0-dim, fp32 or fp64: summed over the target tokens
  at::Tensor weight;  // 0-dim fp64, no gradient: their number
};

LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets);

// This rank's logits are those of the vocabulary's entries from `first` on, as
// many as there are columns, also none (arXiv 1909.08053, section 3).
struct VocabularyShard {
  int64_t first = 0;
  int64_t vocabulary = 0;  // entries in all
  comm::Group* group = nullptr;
};

LossSum cross_entropy(at::Tensor logits, const at::Tensor& targets,
                      const VocabularyShard& shard);

}  // namespace tessera::nn
