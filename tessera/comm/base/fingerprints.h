// The debug mode: before every collective the ranks of a group compare, through
// the store, what they are about to call. For backends that do not compare by
// themselves; on where TORCH_DISTRIBUTED_DEBUG is DETAIL, as in PyTorch.
//
// Comm:   a key a rank and collective; rank 0 of the group reads all, the
//         others that of rank 0. Slow, and it blocks the caller.
// Errors: TS_CHECK, naming two ranks that differ and what each calls;
//         TS_CHECK_REACH when a rank does not come in time. What the backend
//         of one rank alone would refuse is one of these here.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "tessera/comm/base/flight_recorder.h"
#include "tessera/comm/base/rendezvous.h"

namespace tessera::comm {

bool fingerprints_are_on();

class Fingerprints {
 public:
  // `ranks`: global, of the group; `rank` is within it.
  Fingerprints(Rendezvous rendezvous, std::vector<int64_t> ranks, int64_t rank,
               std::chrono::milliseconds timeout);
  void compare(const Operation& operation);

 private:
  void compare_with(int64_t peer, const std::string& own);

  Rendezvous rendezvous_;
  const std::vector<int64_t> ranks_;
  const int64_t rank_;
  const std::chrono::milliseconds timeout_;
  uint64_t compared_ = 0;  // with what the backend refused afterwards
};

}  // namespace tessera::comm
