#include "tessera/program/schedules/bfs.h"

#include "tessera/program/schedules/in_turn.h"

namespace tessera::program::schedules {

std::vector<Turn> bfs(const Shape& shape, int64_t /*stage*/) {
  const int64_t m = shape.num_microbatches;
  return in_turn(in_groups(shape, Op::kForward, m),
                 in_groups(shape, Op::kBackward, m),
                 /*ahead=*/m * shape.chunks);
}

}  // namespace tessera::program::schedules
