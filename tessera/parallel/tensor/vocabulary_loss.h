// Cross-entropy of logits of which every rank has some columns.
//
// Shapes:  logits: (N, V'), this rank's; targets: (N) of int64, alike on all
//          ranks of the group.
// Comm:    two all_reduces over the group: of the maxima, and of the sums of
//          exponentials and targets' logits, 3 N elements of the wide type.
//          Every rank gets the whole sum, and the gradient of its own logits;
//          none in backward.
// Errors:  a target outside [0, V) that is not -100 throws (on the CPU).
// Source:  Shoeybi et al. 2019, arXiv 1909.08053, section 3.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/group.h"
#include "tessera/nn/loss.h"

namespace tessera::parallel::tensor {

// This rank's logits are those of the vocabulary's entries from `first` on, as
// many as there are columns, also none.
struct VocabularyShard {
  int64_t first = 0;
  int64_t vocabulary = 0;  // entries in all
  comm::Group* group = nullptr;
};

// For nn::cross_entropy. REQUIRES: the group outlives it.
nn::SummedLoss vocabulary_loss(const VocabularyShard& shard);

}  // namespace tessera::parallel::tensor
