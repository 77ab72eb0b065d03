// Gradient accumulation: the schedule of a pipeline of one stage.
//
// Each micro-batch goes forward and at once backward, so that the activations
// of one are alive at a time; the last backward reduces. 4K + 4 instructions,
// 3 in place of 4 at the end without clipping.
#pragma once

#include "tessera/program/instruction.h"

namespace tessera::program::schedules {

// REQUIRES: num_microbatches >= 1.
Program accumulation(int64_t num_microbatches, bool clip);

}  // namespace tessera::program::schedules
