// Every kind of module, in every way of sharing and splitting it, on 2, 3 and 4
// ranks that are processes or threads, against one rank, in double. A program
// of its own: autograd does not run in a fork of a process that has used it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/support/own_modules.h"
#include "tests/support/ranks.h"

namespace tessera::tests {
namespace {

std::string name_of(const Ways& ways) {
  return c10::str("stage ", ways.options.zero_stage, ", dp_replicate ",
                  ways.replicate, ", dp_shard ", ways.shard, ", tp ", ways.tp);
}

// Of so many ranks.
std::vector<Ways> all_ways(int64_t world) {
  std::vector<Ways> all;
  for (int64_t stage : {1, 2, 3}) {
    const FullyShardOptions options{.zero_stage = stage};
    all.push_back({.shard = world, .options = options});
    if (world != 4) continue;
    all.push_back({.replicate = 2, .shard = 2, .options = options});
    all.push_back({.shard = 2, .tp = 2, .options = options});
  }
  for (int64_t stage : {0, 3}) {
    all.push_back({.tp = world, .options = {.zero_stage = stage}});
  }
  return all;
}

// Of a process, by kind: of its own widths, and of those that split evenly.
struct Wanted {
  Values plain, split;
};
const std::vector<Wanted>& wanted() {
  static const std::vector<Wanted> all = [] {
    std::vector<Wanted> values;
    for (const Kind& kind : kinds()) {
      values.push_back({one_rank(kind), one_rank(even(kind))});
    }
    return values;
  }();
  return all;
}

void expect_equal_to_one_rank(comm::Communicator& ranks) {
  for (size_t i = 0; i < kinds().size(); ++i) {
    for (const Ways& ways : all_ways(ranks.world_size())) {
      SCOPED_TRACE(c10::str(kinds()[i].name, ", ", name_of(ways)));
      const bool splits = ways.tp > 1;
      const Kind kind = splits ? even(kinds()[i]) : kinds()[i];
      const Values& whole = splits ? wanted()[i].split : wanted()[i].plain;
      const Values found = trained(ranks, kind, ways);
      Values shares;
      ASSERT_EQ(found.size(), whole.size());
      for (size_t j = 0; j < whole.size(); ++j) {
        shares.push_back(
            share_like(whole[j], found[j], ways.tp, ranks.rank() % ways.tp));
      }
      expect_equal(found, shares, 1e-10);
    }
  }
}

class ModuleMatrix : public ::testing::TestWithParam<int64_t> {};

TEST_P(ModuleMatrix, ProcessesEqualOneRank) {
  testing::run_processes(GetParam(), "shm", expect_equal_to_one_rank);
}

// In a process of theirs, so that this one can fork again.
TEST_P(ModuleMatrix, ThreadsEqualOneRank) {
  testing::run_processes(1, "shm", [](comm::Communicator&) {
    comm::run_threads(GetParam(), "shm", expect_equal_to_one_rank);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ModuleMatrix, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace tessera::tests
