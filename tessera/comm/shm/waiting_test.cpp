#include "tessera/comm/shm/waiting.h"

#include <gtest/gtest.h>

namespace tessera::comm::shm {
namespace {

TEST(Waited, CountsLittleOfATimeWithoutLooks) {
  constexpr auto kSlice = Waiter::kSlice;
  Waited waited;
  Waited::Clock::time_point now{std::chrono::hours(1)};
  EXPECT_TRUE(waited.look(now) == kSlice * 0);
  EXPECT_TRUE(waited.look(now += kSlice) == kSlice);
  EXPECT_TRUE(waited.look(now += std::chrono::hours(1)) == 3 * kSlice);
  waited.reset();
  EXPECT_TRUE(waited.look(now += kSlice) == kSlice * 0);
}

}  // namespace
}  // namespace tessera::comm::shm
