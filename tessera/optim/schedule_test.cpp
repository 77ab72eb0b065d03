#include "tessera/optim/schedule.h"

#include <gtest/gtest.h>

#include <vector>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

struct Case {
  const char* type;
  int64_t warmup;
  double min_lr;
  int64_t step;
  double expected;
};

constexpr double kLr = 1.0;
constexpr int64_t kSteps = 110;

// Each schedule at its boundaries; with a warm-up of 10, p = (s - 10) / 100.
constexpr Case kCases[] = {
    {"constant", 0, 0.2, 0, 1.0},
    {"constant", 10, 0.2, 0, 0.1},
    {"constant", 10, 0.2, 4, 0.5},
    {"constant", 10, 0.2, 9, 1.0},
    {"constant", 10, 0.2, 10, 1.0},
    {"constant", 10, 0.2, 109, 1.0},
    {"constant", 10, 0.2, 500, 1.0},
    {"constant", 1, 0.2, 0, 1.0},
    {"linear", 0, 0.0, 0, 1.0},
    {"linear", 0, 0.0, 55, 0.5},
    {"linear", 10, 0.2, 0, 0.1},
    {"linear", 10, 0.2, 9, 1.0},
    {"linear", 10, 0.2, 10, 1.0},
    {"linear", 10, 0.2, 11, 0.992},
    {"linear", 10, 0.2, 60, 0.6},
    {"linear", 10, 0.2, 109, 0.208},
    {"linear", 10, 0.2, 110, 0.2},
    {"linear", 10, 0.2, 111, 0.2},
    {"cosine", 10, 0.2, 9, 1.0},
    {"cosine", 10, 0.2, 10, 1.0},
    {"cosine", 10, 0.2, 35, 0.2 + 0.8 * (1 + 0.70710678118654752) / 2},
    {"cosine", 10, 0.2, 60, 0.6},
    {"cosine", 10, 0.2, 85, 0.2 + 0.8 * (1 - 0.70710678118654752) / 2},
    {"cosine", 10, 0.2, 110, 0.2},
    {"cosine", 10, 0.2, 10'000, 0.2},
    // The last ceil(110 / 5) = 22 steps, 88 to 109, come down.
    {"wsd", 10, 0.2, 9, 1.0},
    {"wsd", 10, 0.2, 10, 1.0},
    {"wsd", 10, 0.2, 87, 1.0},
    {"wsd", 10, 0.2, 88, 1.0 - 0.8 / 22},
    {"wsd", 10, 0.2, 98, 0.6},
    {"wsd", 10, 0.2, 109, 0.2},
    {"wsd", 10, 0.2, 110, 0.2},
    // A warm-up that leaves the decay only two steps.
    {"wsd", 108, 0.0, 107, 1.0},
    {"wsd", 108, 0.0, 108, 0.5},
    {"wsd", 108, 0.0, 109, 0.0},
    // A warm-up as long as the run, or longer.
    {"cosine", 110, 0.2, 109, 1.0},
    {"linear", 220, 0.2, 109, 0.5},
    {"wsd", 110, 0.2, 110, 0.2},
};

TEST(Schedule, AtEveryBoundary) {
  for (const Case& expected : kCases) {
    ScheduleConfig schedule;
    schedule.type = expected.type;
    schedule.warmup = expected.warmup;
    schedule.min_lr = expected.min_lr;
    EXPECT_NEAR(lr_at({.step = expected.step, .steps = kSteps}, kLr, schedule),
                expected.expected, 1e-15)
        << expected.type << " warmup " << expected.warmup << " step "
        << expected.step;
  }
}

TEST(Schedule, HasStepsOfItsOwnAndAShareToFallIn) {
  ScheduleConfig schedule;
  schedule.type = "linear";
  schedule.steps = 50;
  EXPECT_NEAR(lr_at({.step = 25, .steps = 100}, 1.0, schedule), 0.5, 1e-15);
  EXPECT_EQ(lr_at({.step = 70, .steps = 100}, 1.0, schedule), 0.0);
  schedule.type = "wsd";
  schedule.decay = 0.5;
  EXPECT_EQ(lr_at({.step = 24, .steps = 100}, 1.0, schedule), 1.0);
  EXPECT_NEAR(lr_at({.step = 25, .steps = 100}, 1.0, schedule), 0.96, 1e-15);
  EXPECT_NEAR(lr_at({.step = 49, .steps = 100}, 1.0, schedule), 0.0, 1e-15);
}

TEST(Schedule, WarmsUpFromAnyRateByTheLogarithm) {
  ScheduleConfig schedule;
  schedule.type = "constant";
  schedule.warmup = 4;
  schedule.start_lr = 0.2;
  EXPECT_NEAR(lr_at({.step = 0, .steps = 9}, 1.0, schedule), 0.4, 1e-15);
  EXPECT_NEAR(lr_at({.step = 3, .steps = 9}, 1.0, schedule), 1.0, 1e-15);
  schedule.warmup_type = "log";
  EXPECT_NEAR(lr_at({.step = 0, .steps = 9}, 1.0, schedule), 0.2, 1e-15);
  EXPECT_NEAR(lr_at({.step = 1, .steps = 9}, 1.0, schedule), 0.6, 1e-15);
  EXPECT_NEAR(lr_at({.step = 3, .steps = 9}, 1.0, schedule), 1.0, 1e-15);
  schedule.warmup = 1;
  EXPECT_EQ(lr_at({.step = 0, .steps = 9}, 1.0, schedule), 1.0);
}

struct DeepSpeeds {
  const char* name;
  ScheduleConfig schedule;
  double lr;
  std::vector<double> expected;
};

// What deepspeed/runtime/lr_schedules.py (edaa72212) sets for steps 0, 1, ...
TEST(Schedule, CountsAsDeepSpeedDoes) {
  const std::vector<DeepSpeeds> cases = {
      {"WarmupLR",
       {.type = "constant", .warmup = 4, .warmup_type = "log", .start_lr = 0.1},
       0.9,
       {0.1, 0.1, 0.5, 0.7339850002884626, 0.9, 0.9, 0.9, 0.9}},
      {"WarmupLR, linear",
       {.type = "constant", .warmup = 4, .start_lr = 0.1},
       0.9,
       {0.1, 0.1, 0.30000000000000004, 0.5, 0.7000000000000001, 0.9, 0.9}},
      {"WarmupDecayLR, linear",
       {.type = "linear",
        .warmup = 4,
        .start_lr = 0.1,
        .min_lr = 0.1,
        .steps = 10},
       0.9,
       {0.1, 0.1, 0.30000000000000004, 0.5, 0.7000000000000001, 0.9,
        0.7666666666666667, 0.6333333333333333, 0.5, 0.3666666666666667,
        0.23333333333333334, 0.1, 0.1}},
      {"WarmupCosineLR",
       {.type = "cosine",
        .warmup = 4,
        .warmup_type = "log",
        .start_lr = 0.125,
        .min_lr = 0.05,
        .steps = 10},
       0.5,
       {0.0, 0.125, 0.3125, 0.4221804688852168, 0.5, 0.4698557158514987, 0.3875,
        0.275, 0.16250000000000006, 0.08014428414850129, 0.05, 0.05, 0.05}},
      // A warm-up is of two steps at least.
      {"WarmupLR, no warm-up",
       {.type = "constant", .warmup_type = "log"},
       1.0,
       {0.0, 0.0, 1.0, 1.0}}};
  for (DeepSpeeds each : cases) {
    each.schedule.convention = "deepspeed";
    for (size_t step = 0; step < each.expected.size(); ++step) {
      EXPECT_NEAR(lr_at({.step = static_cast<int64_t>(step), .steps = 99},
                        each.lr, each.schedule),
                  each.expected[step], 2e-16)
          << each.name << " step " << step;
    }
  }
}

TEST(Schedule, AnUnknownTypeIsRefused) {
  ScheduleConfig schedule;
  schedule.type = "polynomial";
  EXPECT_THROW(lr_at({.step = 0, .steps = 10}, kLr, schedule), Error);
}

}  // namespace
}  // namespace tessera::optim
