#include "tessera/core/processor.h"

#include <gtest/gtest.h>
#include <sched.h>

namespace tessera {
namespace {

cpu_set_t affinity() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  EXPECT_EQ(sched_getaffinity(0, sizeof cores, &cores), 0);
  return cores;
}

TEST(Processor, HasAName) { EXPECT_FALSE(processor_name().empty()); }

TEST(CacheLine, TripTakesTimeAndLeavesTheAffinity) {
  const cpu_set_t before = affinity();
  const auto trip_ns = cache_line_round_trip_ns();
  const cpu_set_t after = affinity();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  ASSERT_EQ(trip_ns.has_value(), CPU_COUNT(&before) > 1);
  if (trip_ns) {
    EXPECT_GT(*trip_ns, 1.0);
  }
}

// As mpirun binds ranks: the other core is one that this thread may not use.
TEST(CacheLine, IsMeasuredFromOneCoreToo) {
  const cpu_set_t before = affinity();
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(cache_line_round_trip_ns().has_value(), CPU_COUNT(&before) > 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace tessera
