#include "tessera/train/spike_watch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace tessera::train {
namespace {

constexpr int64_t kWindow = 128;

// The curve of a training run, and its noise.
class Losses {
 public:
  double next() {
    ++step_;
    return 2 + 8 * std::pow(step_, -0.3) + noise_(random_);
  }

 private:
  std::mt19937 random_{7};
  std::normal_distribution<double> noise_{0, 0.05};
  int64_t step_ = 0;
};

TEST(SpikeWatch, NoiseIsNone) {
  SpikeWatch watch({}, {});
  Losses losses;
  for (int step = 1; step <= 100'000; ++step) {
    EXPECT_FALSE(watch.add(losses.next())) << step;
  }
}

TEST(SpikeWatch, NoneBeforeTheWindowIsFull) {
  SpikeWatch watch({}, {});
  for (int64_t step = 1; step < kWindow; ++step) watch.add(3);
  EXPECT_FALSE(watch.add(30));
  EXPECT_TRUE(watch.add(30));
}

TEST(SpikeWatch, AnyNumberOfStepsHighIsOne) {
  SpikeWatch watch({}, {});
  Losses losses;
  for (int step = 0; step < 500; ++step) watch.add(losses.next());
  const auto first = watch.add(losses.next() + 1);
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->is_first);
  EXPECT_NEAR(first->median, 2 + 8 * std::pow(437, -0.3), 0.03);
  EXPECT_GT(first->deviations, 12);
  const auto second = watch.add(losses.next() + 1);
  ASSERT_TRUE(second);
  EXPECT_FALSE(second->is_first);
  EXPECT_FALSE(watch.add(losses.next()));
  EXPECT_TRUE(watch.add(losses.next() + 1)->is_first);
}

TEST(SpikeWatch, ALevelThatStaysIsTheNewOne) {
  SpikeWatch watch({}, std::vector<double>(kWindow, 3.0));
  int64_t high = 0;
  while (watch.add(5)) ++high;
  EXPECT_EQ(high, kWindow / 2 + 1);
}

TEST(SpikeWatch, WhatIsLearnedByHeartHasSpikesOfSomeSizeAlone) {
  SpikeWatch quiet({}, std::vector<double>(kWindow, 2.0));
  EXPECT_FALSE(quiet.add(2.11));
  EXPECT_TRUE(quiet.add(2.13));
  SpikeWatch known({}, std::vector<double>(kWindow, 0.0));
  EXPECT_FALSE(known.add(0.0059));
  EXPECT_TRUE(known.add(0.0061));
}

TEST(SpikeWatch, WhatIsNoNumberDoesNotCount) {
  SpikeWatch watch({}, std::vector<double>(kWindow, 3.0));
  EXPECT_FALSE(watch.add(std::numeric_limits<double>::quiet_NaN()));
  EXPECT_FALSE(watch.add(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(watch.losses(), std::vector<double>(kWindow, 3.0));
}

TEST(SpikeWatch, ItGoesOnFromTheLossesOfACheckpoint) {
  SpikeWatch whole({}, {});
  Losses losses;
  for (int step = 0; step < 300; ++step) whole.add(losses.next());
  SpikeWatch resumed({}, whole.losses());
  for (const double more : {0.2, 0.3, 0.4, 1.0}) {
    const double loss = losses.next() + more;
    const auto one = whole.add(loss), other = resumed.add(loss);
    ASSERT_EQ(one.has_value(), other.has_value()) << more;
    EXPECT_EQ(one ? one->deviations : 0, other ? other->deviations : 0);
  }
}

TEST(SpikeWatch, NoneIsLookedForWhereNoneIsAskedFor) {
  SpikeWatch watch({.action = "none"}, {3, 3, 3});
  for (int64_t step = 0; step < 2 * kWindow; ++step) watch.add(3);
  EXPECT_FALSE(watch.add(30));
  EXPECT_TRUE(watch.losses().empty());
}

}  // namespace
}  // namespace tessera::train
