// dualpipe: two replicas of p stages in opposite directions: rank s holds stage
// s of the one and stage p - 1 - s of the other, whose micro-batches are the
// even and the odd ones, and gradients are summed over the pair. p and m are
// even.
// From 2 p micro-batches on a rank waits (p / 2 - 1)(tfb + tb - 2 tw) between
// its first and its last task, counted as dualpipe_v's; p + 1 micro-batches are
// alive, and parameters and their gradients are held twice.
// Source: DeepSeek-AI 2024, arXiv 2412.19437 (DualPipe).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> dualpipe(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
