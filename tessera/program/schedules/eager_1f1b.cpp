#include "tessera/program/schedules/eager_1f1b.h"

#include "tessera/program/schedules/in_turn.h"

namespace tessera::program::schedules {

std::vector<Turn> eager_1f1b(const Shape& shape, int64_t stage) {
  const int64_t m = shape.num_microbatches;
  return in_turn(in_groups(shape, Op::kForward, m),
                 in_groups(shape, Op::kBackward, m),
                 2 * (shape.stages - 1 - stage));
}

}  // namespace tessera::program::schedules
