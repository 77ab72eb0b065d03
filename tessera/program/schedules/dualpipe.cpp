#include "tessera/program/schedules/dualpipe.h"

#include <algorithm>

#include "tessera/program/schedules/dualpipe_v.h"

namespace tessera::program::schedules {

// A rank of the second half is one of the first seen from the other end.
std::vector<Turn> dualpipe(const Shape& shape, int64_t stage) {
  const int64_t p = shape.stages;
  const bool is_behind = stage >= p / 2;
  std::vector<Turn> turns = in_two_directions(
      p / 2, std::min(stage, p - 1 - stage), shape.num_microbatches / 2);
  for (Turn& turn : turns) {
    for (Task& task : turn) {
      if (is_behind) task.chunk = 1 - task.chunk;
      task.microbatch = 2 * task.microbatch + task.chunk;
    }
  }
  return turns;
}

}  // namespace tessera::program::schedules
