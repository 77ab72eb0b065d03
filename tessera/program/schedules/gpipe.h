// gpipe: all forwards, then all backwards, the last micro-batch first, or in
// the order of the forwards. A step takes (m + p - 1)(tf + tb), and m
// micro-batches are alive.
// Source: Huang et al. 2019, arXiv 1811.06965.
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> gpipe(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
