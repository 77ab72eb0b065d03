// Every verb on a backend, over threads or processes, against values that each
// rank computes for itself: a test program says with which worlds.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/verbs.h"

namespace tessera::testing {

// A backend, processes or threads, a world.
struct Where {
  std::string backend;
  bool processes = false;
  int64_t world = 2;
  std::string name() const {
    return backend + (processes ? "_processes_" : "_threads_") +
           std::to_string(world);
  }
  friend void PrintTo(const Where& where, std::ostream* out) {
    *out << where.name();
  }
};

inline void run_there(const Where& where, const RankBody& body) {
  if (where.processes) {
    run_processes(where.world, where.backend, body);
  } else {
    comm::run_threads(where.world, where.backend, body,
                      std::chrono::seconds(30));
  }
}

// shm and gloo, processes and threads, with each of these worlds.
inline std::vector<Where> everywhere(const std::vector<int64_t>& worlds) {
  std::vector<Where> all;
  for (const char* backend : {"shm", "gloo"}) {
    for (bool processes : {false, true}) {
      for (int64_t world : worlds) all.push_back({backend, processes, world});
    }
  }
  return all;
}

class GroupTest : public ::testing::TestWithParam<Where> {};

TEST_P(GroupTest, Reduces) { run_there(GetParam(), expect_reductions); }
TEST_P(GroupTest, Moves) { run_there(GetParam(), expect_moves); }
TEST_P(GroupTest, PassesMessages) { run_there(GetParam(), expect_messages); }
TEST_P(GroupTest, RunsSequences) { run_there(GetParam(), expect_sequences); }

}  // namespace tessera::testing
