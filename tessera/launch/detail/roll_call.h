// The keys by which ranks that have no communicator yet tell the others that
// they are there, or why they will not be.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/core/error.h"
#include "tessera/launch/environment.h"

namespace tessera::launch::detail {

// Says that this rank is there. TS_CHECK_CONFIG where its number is taken or
// its peers were told of another world size.
void answer_the_roll(const RankEnvironment& here, c10d::Store& store);

// Waits for all ranks; TS_CHECK_REACH names those that did not come.
void await_all(const RankEnvironment& here, c10d::Store& store);

// Fills in what the launcher did not say, from the hosts of all ranks.
void complete_places(RankEnvironment& here, c10d::Store& store);

// "HOST, process PID" of a rank that has answered.
std::string whereabouts_of(int64_t rank, c10d::Store& store);

// Set once there is nothing to wait for: all are ready, or one was refused.
inline constexpr const char* kDecided = "decided";

// Why this rank ends, for all that wait: the first refusal is the one that is
// told, also by who heard of it. Whose end may be that of the store stays until
// all have heard, for so long at most: rank 0, and of torchrun's ranks the one
// that was refused. REQUIRES: the roll was answered.
void leave_refusal(const RankEnvironment& here, c10d::Store& store,
                   const Error& error, std::chrono::milliseconds patience);

// Throws PeerRefused where one was.
void check_no_refusal(const RankEnvironment& here, c10d::Store& store);

}  // namespace tessera::launch::detail
