// Copies of files from one rank's host to another's, in messages.
//
// Comm:   send and recv of the group, in pieces of at most 16 MiB; all that a
//         rank sends and receives goes side by side. Blocks until it is done.
// Memory: that much for each file that a rank sends or receives.
// Errors: thrown of the group alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/hash.h"

namespace tessera::checkpoint::detail {

struct FileTransfer {
  std::string name;
  int64_t bytes = 0;
  Hash128 hash;                      // that the received bytes must have
  int64_t sender = 0, receiver = 0;  // distinct ranks of the group
};

// The same `transfers` on every rank, each of which reads and writes them in
// its own `folder`. A file that is there is replaced once all of the new one is
// here. Returns the first rank's complaint, the same on every rank; "": all
// came. A rank that complains does its part of the rest all the same.
std::string transfer_files(comm::Group& group, const std::string& folder,
                           const std::vector<FileTransfer>& transfers);

}  // namespace tessera::checkpoint::detail
