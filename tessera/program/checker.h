// Proves a program sound before it runs.
//
// Rules: every micro-batch is loaded, goes forward once and backward once, in
//        that order; exactly one backward reduces, and it is the last;
//        gradients are zeroed before the first backward, reduced before they
//        are clipped, clipped before the optimizer's one step.
// Errors: TORCH_INTERNAL_ASSERT names the instruction and the rule: a schedule
//        that breaks one is a programmer's error.
#pragma once

#include "tessera/program/instruction.h"

namespace tessera::program {

struct Proof {
  int64_t num_microbatches = 0;
  // The most micro-batches between their forward and their backward.
  int64_t peak_alive = 0;
};

Proof check(const Program& program);

}  // namespace tessera::program
