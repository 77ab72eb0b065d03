#include "tessera/comm/shm/cores.h"

#include <gtest/gtest.h>

namespace tessera::comm::shm {
namespace {

cpu_set_t cores(const std::vector<int>& numbers) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int number : numbers) CPU_SET(number, &set);
  return set;
}

TEST(Cores, AreEnoughWhereEveryRankMayHaveOne) {
  const cpu_set_t two = cores({0, 1});
  EXPECT_TRUE(have_cores({two, two}, 2));
  // Two of the four ranks of a host with two cores.
  EXPECT_FALSE(have_cores({two, two}, 4));
}

TEST(Cores, AreEnoughWhereALauncherBoundEachRankToItsOwn) {
  EXPECT_TRUE(have_cores({cores({0}), cores({1})}, 2));
  EXPECT_TRUE(have_cores({cores({0, 1}), cores({2, 3})}, 4));
  EXPECT_FALSE(have_cores({cores({0}), cores({0})}, 2));
}

TEST(Cores, AreNotCountedWhereTheSystemDoesNotSay) {
  EXPECT_FALSE(have_cores({cores({}), cores({})}, 2));
}

}  // namespace
}  // namespace tessera::comm::shm
