// How a rank reaches the tensors of its peers where they lie.
//
// In registered memory a peer maps the file; ranks that are threads of one
// process share addresses; else the system copies out of the other process,
// where it lets every rank do so.
// Threads: one at a time.
// Errors:  c10::DistBackendError where the peer has died or left, or the system
//          does not copy; TS_CHECK_REACH where a file cannot be mapped.
#pragma once

#include <cstdint>

#include "tessera/comm/shm/registered.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

class PeerMemory {
 public:
  explicit PeerMemory(const Segment& segment) : segment_(segment) {}

  // What to tell the peers; kNowhere: they cannot reach it.
  Share share_of(const void* data) const;
  // REQUIRES: kAddress or kRegion. The address here of a rank's data.
  char* address_of(int64_t rank, const Share& share);
  // REQUIRES: not kNowhere, not kUnread.
  void copy_from(int64_t rank, const Share& share, void* to, int64_t offset,
                 int64_t bytes);

 private:
  // Throws where the peer has died or left.
  void check_not_lost(int64_t rank) const;

  const Segment& segment_;
  PeerRegions regions_;
};

}  // namespace tessera::comm::shm
