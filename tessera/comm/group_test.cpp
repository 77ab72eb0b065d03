// Every verb; with more ranks than cores: group_slow_test.
#include "tests/support/group_suite.h"

namespace tessera::testing {

INSTANTIATE_TEST_SUITE_P(Everywhere, GroupTest,
                         ::testing::ValuesIn(everywhere({2, 3})),
                         [](const auto& info) { return info.param.name(); });

}  // namespace tessera::testing
