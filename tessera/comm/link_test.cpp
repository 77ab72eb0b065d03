#include "tessera/comm/link.h"

#include <gtest/gtest.h>

#include <set>

#include "tessera/comm/communicator.h"

namespace tessera::comm {
namespace {

TEST(Links, EveryPairMeetsOnceInARound) {
  for (int64_t size = 2; size <= 9; ++size) {
    std::set<std::pair<int64_t, int64_t>> pairs;
    for (int64_t round = 0; round < rounds_of_links(size); ++round) {
      for (int64_t rank = 0; rank < size; ++rank) {
        const auto peer = link_peer(rank, size, round);
        if (!peer) continue;
        ASSERT_NE(*peer, rank);
        ASSERT_LT(*peer, size);
        EXPECT_EQ(link_peer(*peer, size, round), rank) << size << ' ' << round;
        if (rank > *peer) continue;
        EXPECT_TRUE(pairs.emplace(rank, *peer).second);
      }
    }
    EXPECT_EQ(pairs.size(), size * (size - 1) / 2) << size << " ranks";
  }
}

TEST(Links, TheLowerRankOfAPairTellsItsSpeed) {
  run_threads(3, "shm", [](Communicator& ranks) {
    Group& world = ranks.world();
    for (int64_t round = 0; round < rounds_of_links(3); ++round) {
      const auto peer = link_peer(world.rank(), 3, round);
      const auto speed = measure_link(world, round);
      ASSERT_EQ(speed.has_value(), peer && world.rank() < *peer);
      if (!speed) continue;
      EXPECT_GT(speed->latency_us, 0);
      EXPECT_GT(speed->bytes_per_s, 0);
    }
  });
}

}  // namespace
}  // namespace tessera::comm
