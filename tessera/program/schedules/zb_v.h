// zb_v: two chunks a rank in a V, so that a rank has the first and the last
// virtual stage, the second and the last but one; and backwards in two parts.
// Where tf, tb and tw are equal no rank waits between its first and its last
// task, from 2 p - 1 micro-batches on; 2 p chunks' micro-batches are alive, as
// much as p of 1f1b's.
// Source: Qi et al. 2024, arXiv 2405.15362 (ZB-V).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> zb_v(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
