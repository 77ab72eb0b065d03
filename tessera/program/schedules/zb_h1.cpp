#include "tessera/program/schedules/zb_h1.h"

#include "tessera/program/schedules/in_turn.h"

namespace tessera::program::schedules {

std::vector<Turn> zb_h1(const Shape& shape, int64_t stage) {
  const int64_t m = shape.num_microbatches;
  return with_late_weights(in_groups(shape, Op::kForward, m),
                           in_groups(shape, Op::kBackward, m),
                           shape.stages - 1 - stage, /*late=*/stage);
}

}  // namespace tessera::program::schedules
