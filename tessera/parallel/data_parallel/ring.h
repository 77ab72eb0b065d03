// The ring all-reduce, move by move: the other way to sum what DataParallel
// sums in a star. Arithmetic only, for counting bytes and for understanding;
// the communicators have their own.
//
// N ranks send to their right neighbour, rank N-1 to 0. The tensor is cut into
// N chunks. In N-1 steps of reduce-scatter rank r sends chunk r - step, which
// its receiver adds; then rank r holds the whole sum of chunk r + 1. In N-1
// steps of all-gather it sends chunk r + 1 - step, which its receiver keeps.
// Units:  chunks of 1/N of the tensor; 2 (N-1) moves in and out for each rank.
// Source: Patarasuk and Yuan 2009, bandwidth optimal all-reduce.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::parallel::data_parallel {

struct RingMove {
  int64_t step;  // from 0; the moves of one step happen at once
  int64_t from;
  int64_t to;
  int64_t chunk;
  bool adds;  // reduce-scatter; false: all-gather
  bool operator==(const RingMove&) const = default;
};

// In the order of (step, from).
std::vector<RingMove> ring_all_reduce(int64_t num_ranks);

}  // namespace tessera::parallel::data_parallel
