#include "tessera/comm/host_map.h"

#include <gtest/gtest.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

TEST(HostMap, PutsRanksIntoPlaces) {
  const auto map = make_host_map({"b", "a", "b", "a", "c"}, 3);
  EXPECT_EQ(map.members,
            (std::vector<std::vector<int64_t>>{{0, 2}, {1, 3}, {4}}));
  EXPECT_EQ(map.host, 1);
  EXPECT_EQ(map.local, 1);
  EXPECT_FALSE(map.is_even());
  EXPECT_EQ(map.leaders(), (std::vector<int64_t>{0, 1, 4}));
  const auto even = make_host_map({"b", "a", "b", "a"}, 2);
  EXPECT_TRUE(even.is_even());
  EXPECT_EQ(even.column(), (std::vector<int64_t>{2, 3}));
}

TEST(HostMap, EveryRankKnowsAllHosts) {
  run_threads(3, "shm", [](Communicator& communicator) {
    EXPECT_EQ(hosts_of(communicator.world()),
              std::vector<std::string>(3, host_identity()));
  });
}

}  // namespace
}  // namespace tessera::comm
