// Every verb on every backend, over threads and processes, against values that
// each rank computes for itself. With more ranks than cores.
#include "tessera/comm/group.h"

#include <gtest/gtest.h>

#include "tests/support/verbs.h"
#include "tests/support/where.h"

namespace tessera::comm {
namespace {

using testing::run_there;

class ManyRanks : public ::testing::TestWithParam<testing::Where> {};

TEST_P(ManyRanks, Reduces) {
  run_there(GetParam(), testing::expect_reductions);
}
TEST_P(ManyRanks, Moves) { run_there(GetParam(), testing::expect_moves); }
TEST_P(ManyRanks, PassesMessages) {
  run_there(GetParam(), testing::expect_messages);
}
TEST_P(ManyRanks, RunsSequences) {
  run_there(GetParam(), testing::expect_sequences);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ManyRanks,
                         ::testing::ValuesIn(testing::everywhere({4, 8})),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace tessera::comm
