// zb_h2: zb_h1 with 2 (p - 1 - s) forwards ahead and weights' parts 2 s
// micro-batches late. A stage waits (p - 1)(tf + tb - 2 tw) between its first
// and its last task, nothing where the three take equally long; min(m, 2 p - 1)
// micro-batches are alive on every stage.
// Source: Qi et al. 2023, arXiv 2401.10241 (ZB-H2).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> zb_h2(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
