// eager_1f1b: 1f1b with 2 (p - 1 - s) forwards ahead: twice as many, so that a
// micro-batch and its gradient travel while the stage works on others.
// A step takes that of 1f1b as long as a message takes no longer than half of a
// forward and a backward, with min(m, 2 (p - s) - 1) micro-batches alive.
// Source: Zhuang et al. 2022, arXiv 2211.05322 (eager 1F1B).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> eager_1f1b(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
