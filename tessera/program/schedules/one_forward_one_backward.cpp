#include "tessera/program/schedules/one_forward_one_backward.h"

#include "tessera/program/schedules/in_turn.h"

namespace tessera::program::schedules {

std::vector<Turn> one_forward_one_backward(const Shape& shape, int64_t stage) {
  const int64_t m = shape.num_microbatches;
  return in_turn(in_groups(shape, Op::kForward, m),
                 in_groups(shape, Op::kBackward, m), shape.stages - 1 - stage);
}

}  // namespace tessera::program::schedules
