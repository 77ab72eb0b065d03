// 1f1b: p - 1 - s forwards ahead, then forward and backward in turn: the step
// of gpipe, with min(m, p - s) micro-batches alive.
// Source: Narayanan et al. 2021, arXiv 2006.09503 (1F1B with flush).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> one_forward_one_backward(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
