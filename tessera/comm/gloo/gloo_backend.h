// c10d::Backend over LibTorch's ProcessGroupGloo: ranks on any hosts, over TCP.
//
// Collectives run in the order of the calls on one thread of the group. Adds to
// LibTorch's class what groups promise: the mean, any dtype where bytes are
// only moved, sizes of 0.
// Order:  Gloo chooses the order of a sum by size and ranks: every rank gets
//         the same bits, but not those of shm. fp16 and bf16 are summed as
//         they are. int16 is not reduced.
// Done:   a send or receive that nobody awaits counts as done when those called
//         before it are.
// Errors: c10d's, on the Work.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/rendezvous.h"

namespace tessera::comm::gloo {

struct GlooOptions {
  int rank = 0;  // within the group
  int size = 1;
  std::string address;  // that this rank listens on
  std::chrono::milliseconds timeout;
};

// Blocks until every rank of the group is connected. Its fail() closes the
// connections to all peers.
Connection make_gloo_backend(Rendezvous rendezvous, const GlooOptions& options);

}  // namespace tessera::comm::gloo
