// Every verb on every backend, over threads and processes, against values that
// each rank computes for itself.
#include "tessera/comm/group.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/verbs.h"

namespace tessera::comm {
namespace {

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

void run(const Where& where, const testing::RankBody& body) {
  if (where.processes) {
    testing::run_processes(where.world, where.backend, body);
  } else {
    run_threads(where.world, where.backend, body, std::chrono::seconds(30));
  }
}

class GroupTest : public ::testing::TestWithParam<Where> {};

TEST_P(GroupTest, Reduces) { run(GetParam(), testing::expect_reductions); }
TEST_P(GroupTest, Moves) { run(GetParam(), testing::expect_moves); }
TEST_P(GroupTest, PassesMessages) { run(GetParam(), testing::expect_messages); }
TEST_P(GroupTest, RunsSequences) { run(GetParam(), testing::expect_sequences); }

std::vector<Where> everywhere() {
  std::vector<Where> all;
  for (const char* backend : {"shm", "gloo"}) {
    for (bool processes : {false, true}) {
      for (int64_t world : {2, 3, 4, 8}) {
        all.push_back({backend, processes, world});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GroupTest,
                         ::testing::ValuesIn(everywhere()),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace tessera::comm
