// The collectives over a Segment: every rank stages what the others read.
//
// A rank copies a round of its data into one of its two halves, comes to the
// meeting, and reads from the others' halves. Whoever has passed meeting k
// knows that all are done with the half of meeting k-1, so one meeting a round
// is enough. At each meeting the ranks compare what they do (Call): different
// verbs, sizes, dtypes or reductions are an error, never a wrong sum.
// all_reduce above kSliceFromBytes: each rank reduces its slice (rank order),
// a second meeting, all copy all slices.
//
// Threads: one. Errors: c10::DistBackendError, TS_CHECK where ranks disagree;
// the group adds its names.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

class Collectives {
 public:
  explicit Collectives(Segment& segment);

  void all_reduce(void* data, int64_t numel, at::ScalarType dtype, ReduceOp op);
  // output: `size` pieces of `numel`; it may contain input at its own place.
  void all_gather(void* output, const void* input, int64_t numel,
                  at::ScalarType dtype);
  // input: `size` pieces of `numel`.
  void reduce_scatter(void* output, const void* input, int64_t numel,
                      at::ScalarType dtype, ReduceOp op);
  // Bytes to and from each rank; pieces lie one after the other.
  void all_to_all(std::span<const int64_t> out_bytes, void* output,
                  std::span<const int64_t> in_bytes, const void* input,
                  at::ScalarType dtype);
  void broadcast(void* data, int64_t numel, at::ScalarType dtype, int64_t root);
  void barrier();

 private:
  class Scope;
  // Says that this rank has staged its round (or is done with its slice) and
  // waits until all have; compares what they do.
  void meet();
  void wait_for(int64_t peer);
  void check_no_failure() const;
  void check_peers();
  void compare_call(int64_t peer) const;
  std::string missing_peers() const;
  bool has_arrived(int64_t peer) const;
  char* own_stage() const;
  char* stage_of(int64_t rank) const;
  // Peers, starting after this rank, so that not all read the same one.
  int64_t peer(int64_t k) const { return (rank_ + k) % size_; }
  void exchange_splits(std::span<const int64_t> out_bytes,
                       std::span<const int64_t> in_bytes);
  int64_t split(int64_t rank, int64_t index) const;

  Segment& segment_;
  const int64_t rank_;
  const int64_t size_;
  const int spins_;
  Call call_;
  uint64_t sequence_ = 0;
  uint32_t meeting_ = 0;
  int half_ = 0;
  int splits_parity_ = 0;
  std::chrono::steady_clock::time_point arrived_;  // at the meeting
};

}  // namespace tessera::comm::shm
