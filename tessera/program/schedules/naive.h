// naive: one micro-batch at a time. With tf and tb for a forward and a backward
// of a micro-batch a step takes m p (tf + tb), and one is alive.
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> naive(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
