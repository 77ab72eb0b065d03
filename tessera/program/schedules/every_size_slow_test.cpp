#include <gtest/gtest.h>

#include "tessera/program/schedules/schedule.h"
#include "tests/support/programs.h"

namespace tessera::program::schedules {
namespace {

// For every schedule and a grid of sizes: each stage's program is sound, and
// all come to their end where a send waits for its receive, with messages
// awaited at once and later, and with backwards whole and split.
TEST(Schedules, EverySizeIsSoundAndEnds) {
  const std::vector<passes::Choice> choices = {
      {},
      {.without = {"messages"}},
      {.with = {"split_backward"}},
      {.without = {"messages"}, .with = {"split_backward"}}};
  for (const Schedule& schedule : all()) {
    for (int64_t p = 1; p <= 8; ++p) {
      for (int64_t v = 1; v <= 3; ++v) {
        for (int64_t m = 1; m <= 16; ++m) {
          const Shape shape{.stages = p, .chunks = v, .num_microbatches = m};
          if (!takes(schedule, shape)) continue;
          if (m > 2 * p + 1 && m < 16) continue;  // the steady state is longer
          for (const passes::Choice& choice : choices) {
            for (int64_t n = 1; n <= (schedule.delayed ? 3 : 1); ++n) {
              EXPECT_NO_THROW(
                  check(stages_of(schedule.name, shape, 1, choice, n).world))
                  << schedule.name << " p " << p << " v " << v << " m " << m
                  << ", steps " << n;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::program::schedules
