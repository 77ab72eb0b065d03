// interleaved: 1f1b over v p virtual stages, micro-batches in groups of p. A
// step takes (m + (p - 1) / v)(tf + tb).
// Source: Narayanan et al. 2021, arXiv 2104.04473.
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> interleaved(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
