// How fast the links between ranks are: latency and bandwidth, pair by pair.
//
// In a round every rank has another peer, so that no two measurements share a
// rank; size - 1 rounds (size, if that is odd) meet every pair once (the circle
// method of tournaments).
// Comm:   a few messages of 4 bytes and of kLinkBytes with that peer.
// Errors: those of send and recv.
// Threads: as group.h.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/comm/group.h"

namespace tessera::comm {

inline constexpr int64_t kLinkBytes = 256 << 10;

struct LinkSpeed {
  double latency_us = 0;   // one way: half of the quickest round trip
  double bytes_per_s = 0;  // of kLinkBytes, at best, less that latency
};

int64_t rounds_of_links(int64_t size);
// Whom `rank` meets in that round; nobody in one round if the size is odd.
std::optional<int64_t> link_peer(int64_t rank, int64_t size, int64_t round);

// All ranks of the group call it with the same round. Told by the lower rank of
// each pair; none on the others.
std::optional<LinkSpeed> measure_link(Group& group, int64_t round);

}  // namespace tessera::comm
