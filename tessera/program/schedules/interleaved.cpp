#include "tessera/program/schedules/interleaved.h"

#include "tessera/program/schedules/in_turn.h"
#include "tessera/program/schedules/one_forward_one_backward.h"

namespace tessera::program::schedules {

std::vector<Turn> interleaved(const Shape& shape, int64_t stage) {
  const int64_t p = shape.stages, v = shape.chunks;
  if (v == 1) return one_forward_one_backward(shape, stage);
  return in_turn(in_groups(shape, Op::kForward, p),
                 in_groups(shape, Op::kBackward, p),
                 2 * (p - 1 - stage) + (v - 1) * p, /*paired=*/true);
}

}  // namespace tessera::program::schedules
