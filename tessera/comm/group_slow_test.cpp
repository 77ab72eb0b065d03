// Every verb, with more ranks than cores.
#include "tests/support/group_suite.h"

namespace tessera::testing {

INSTANTIATE_TEST_SUITE_P(Everywhere, GroupTest,
                         ::testing::ValuesIn(everywhere({4, 8})),
                         [](const auto& info) { return info.param.name(); });

}  // namespace tessera::testing
