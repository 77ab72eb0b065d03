// Runs a body on several ranks, as threads or as processes of this host, and
// says how each ended.
//
// Processes are forked: call it before this process has started threads of its
// own (run_threads joins its threads, so tests may mix both).
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

struct RankEnd {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  std::string message;  // of the exception that ended it, or empty
};

using RankBody = std::function<void(comm::Communicator&)>;

// Forks `world_size` ranks. A rank ends with 0, or with 1 when the body throws
// or a gtest expectation fails in it.
std::vector<RankEnd> fork_ranks(
    int64_t world_size, const std::string& backend, const RankBody& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

// The same with all options; `rank` and `store` are filled in.
std::vector<RankEnd> fork_ranks(comm::CommunicatorOptions options,
                                const RankBody& body);

// fork_ranks, expecting that every rank ends well.
void run_processes(
    int64_t world_size, const std::string& backend, const RankBody& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

// What run_threads fails with; "": it does not.
std::string failure_of_threads(const std::string& backend, int64_t world_size,
                               const RankBody& body);

}  // namespace tessera::testing
