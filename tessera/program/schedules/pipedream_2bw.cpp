#include "tessera/program/schedules/pipedream_2bw.h"

#include "tessera/program/schedules/one_forward_one_backward.h"

namespace tessera::program::schedules {

std::vector<Turn> pipedream_2bw(const Shape& shape, int64_t stage) {
  return one_forward_one_backward(shape, stage);
}

}  // namespace tessera::program::schedules
