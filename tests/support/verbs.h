// The verbs of a group, against values that each rank computes for itself:
// written once, run on every backend.
//
// Every rank of the communicator calls them; they end with gtest's failures.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera::testing {

// Every reduction of every dtype, of sizes from 0.
void expect_reductions(comm::Communicator& communicator);
// Gathers, broadcasts, exchanges.
void expect_moves(comm::Communicator& communicator);
// Messages around a ring and by tag; 4 MiB ones that cross.
void expect_messages(comm::Communicator& communicator);
// Many operations in flight, and random ones on random subgroups.
void expect_sequences(comm::Communicator& communicator);

}  // namespace tessera::testing
