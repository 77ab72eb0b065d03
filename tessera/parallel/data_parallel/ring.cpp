#include "tessera/parallel/data_parallel/ring.h"

namespace tessera::parallel::data_parallel {

std::vector<RingMove> ring_all_reduce(int64_t num_ranks) {
  const auto wrapped = [&](int64_t i) {
    return (i + 2 * num_ranks) % num_ranks;
  };
  std::vector<RingMove> moves;
  for (int64_t step = 0; step < 2 * (num_ranks - 1); ++step) {
    const bool adds = step < num_ranks - 1;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      // The first step of the all-gather is step N-1: r + 1 - 0 = r - (N-1)
      // modulo N, so one formula serves both halves.
      moves.push_back(
          {step, rank, wrapped(rank + 1), wrapped(rank - step), adds});
    }
  }
  return moves;
}

}  // namespace tessera::parallel::data_parallel
