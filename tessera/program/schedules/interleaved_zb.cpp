#include "tessera/program/schedules/interleaved_zb.h"

#include "tessera/program/schedules/in_turn.h"
#include "tessera/program/schedules/zb_h1.h"

namespace tessera::program::schedules {

std::vector<Turn> interleaved_zb(const Shape& shape, int64_t stage) {
  const int64_t p = shape.stages, v = shape.chunks;
  if (v == 1) return zb_h1(shape, stage);
  return with_late_weights(in_groups(shape, Op::kForward, p),
                           in_groups(shape, Op::kBackward, p),
                           2 * (p - 1 - stage) + (v - 1) * p, /*late=*/stage);
}

}  // namespace tessera::program::schedules
