#include "tessera/program/schedules/gpipe.h"

#include <algorithm>

#include "tessera/program/schedules/in_turn.h"

namespace tessera::program::schedules {

std::vector<Turn> gpipe(const Shape& shape, int64_t /*stage*/) {
  const int64_t m = shape.num_microbatches;
  auto backwards = in_groups(shape, Op::kBackward, m);
  if (shape.reversed) std::ranges::reverse(backwards);
  return in_turn(in_groups(shape, Op::kForward, m), backwards, /*ahead=*/m);
}

}  // namespace tessera::program::schedules
