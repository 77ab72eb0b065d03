// c10d::Backend over LibTorch's ProcessGroupNCCL: tensors of GPUs, between
// ranks that have a GPU each. Stands beside a backend of the CPU
// (base/routed_backend.h).
//
// Lanes:   the collectives of a group are one communicator; messages have one
//          for each pair and direction, so that those that cross never block
//          each other. Each opens at its first use (lane.h).
// Tags:    NCCL has none: what one rank sends another is received in the order
//          of the sends, whatever its tags. That of pipelines is proven
//          (program/world.h).
// Order:   NCCL chooses the order of a sum by size and ranks.
// Dtypes:  any where bytes are only moved; int16 is not summed.
// Time:    an operation's seconds and its time-out are the device's, from where
//          it came to the operation, by events. LibTorch's own watchdog, which
//          ends a process, is not started.
// Errors:  see lane.h; a rank whose operation failed can call nothing more.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/nccl/lane.h"

namespace tessera::comm::nccl {

struct Place {
  int64_t rank = 0;            // within the group
  std::vector<int64_t> ranks;  // global, ascending
  std::chrono::milliseconds timeout;
};

// Whether LibTorch has it.
bool is_built();
// What it is; or why it is not there, and the way out.
std::string note();

// The GPU of this thread, as nvidia-smi -L names it: no other has that name.
std::string gpu_of_this_thread();

// Blocks for nobody.
Connection connect(const Rendezvous& rendezvous, const Place& place,
                   const std::shared_ptr<Watch>& watch);

}  // namespace tessera::comm::nccl
