// Every verb on every backend, over threads and processes, against values that
// each rank computes for itself. With more ranks than cores: group_slow_test.
#include "tessera/comm/group.h"

#include <gtest/gtest.h>

#include "tests/support/verbs.h"
#include "tests/support/where.h"

namespace tessera::comm {
namespace {

using testing::run_there;

class GroupTest : public ::testing::TestWithParam<testing::Where> {};

TEST_P(GroupTest, Reduces) {
  run_there(GetParam(), testing::expect_reductions);
}
TEST_P(GroupTest, Moves) { run_there(GetParam(), testing::expect_moves); }
TEST_P(GroupTest, PassesMessages) {
  run_there(GetParam(), testing::expect_messages);
}
TEST_P(GroupTest, RunsSequences) {
  run_there(GetParam(), testing::expect_sequences);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GroupTest,
                         ::testing::ValuesIn(testing::everywhere({2, 3})),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace tessera::comm
