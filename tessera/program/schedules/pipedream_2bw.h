// pipedream_2bw: 1f1b that no step flushes, with p - s micro-batches alive. A
// step's gradient is taken at the weights before the update before it, so that
// two versions of them are enough: W(t + 1) = W(t) - f'(W(t - 1)). The update
// waits for the norm of all stages; what a stage does meanwhile adds to
// gradients of their own, the next batch's, on all stages but the first.
// Source: Narayanan et al. 2021, arXiv 2006.09503 (PipeDream-2BW).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> pipedream_2bw(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
