// bfs: breadth first over chunks: all micro-batches forward through one chunk
// after the other, then backward through the last chunk first. A step takes
// (m + (p - 1) / v)(tf + tb) where m >= p, and v m micro-batches are alive; a
// chunk's gradients are complete, and reduced, while other chunks still go
// backward.
// Source: Lamy-Poirier 2022, arXiv 2211.05953 (breadth-first pipeline).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> bfs(const Shape& shape, int64_t stage);

}  // namespace tessera::program::schedules
