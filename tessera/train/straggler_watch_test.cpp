#include "tessera/train/straggler_watch.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace tessera::train {
namespace {

using monitor::SpanKind;
using ::testing::HasSubstr;

mesh::DeviceMesh two_stages_of_three() {
  mesh::Degrees degrees;
  degrees.pp = 2;
  degrees.dp_replicate = 3;
  return {degrees, 6};
}

// By rank: 1 s of forward and 2 s of backward, times what it is told.
at::Tensor seconds(const std::vector<double>& times) {
  at::Tensor all =
      at::zeros({std::ssize(times), monitor::kNumSpanKinds}, at::kDouble);
  for (int64_t rank = 0; rank < std::ssize(times); ++rank) {
    all[rank][static_cast<int64_t>(SpanKind::kForward)] = 1;
    all[rank][static_cast<int64_t>(SpanKind::kBackward)] = 3 * times[rank] - 1;
    all[rank][static_cast<int64_t>(SpanKind::kWait)] = 6 - 3 * times[rank];
  }
  return all;
}

struct Steps {
  StragglerWatch watch;
  monitor::StepRecord record = {};

  std::optional<News> go(
      const std::function<std::vector<double>(int64_t)>& times) {
    std::optional<News> news;
    for (int64_t step = 0; step < StragglerWatch::kSteps; ++step) {
      watch.add(seconds(times(step)), record);
      if (auto now = watch.take_news()) news = now;
    }
    return news;
  }
};

TEST(Stragglers, RanksOfAsManySamplesAreCompared) {
  const auto mesh = two_stages_of_three();
  const std::vector<int64_t> rows = {3, 3, 2};
  const auto by_samples = [](int64_t) {
    return std::vector{1.5, 1.5, 1.0, 1.5, 1.5, 1.0};
  };
  for (int64_t rank = 0; rank < 6; ++rank) {
    EXPECT_FALSE((Steps{{mesh, rank, rows}}.go(by_samples))) << rank;
  }
  const auto slow = [](int64_t) {
    return std::vector{1.0, 1.5, 1.5, 1.0, 1.0, 1.0};
  };
  EXPECT_TRUE((Steps{{mesh, 1, rows}}.go(slow)));
  EXPECT_FALSE((Steps{{mesh, 2, rows}}.go(slow)));  // nobody has as many
}

TEST(Stragglers, ARankIsHeldAgainstItsStage) {
  const auto mesh = two_stages_of_three();
  Steps slow{{mesh, 4}}, beside{{mesh, 5}}, other_stage{{mesh, 0}};
  // Stage 0 does half as much.
  const auto times = [](int64_t) {
    return std::vector{0.5, 0.5, 0.5, 1.0, 1.5, 1.0};
  };
  const auto news = slow.go(times);
  ASSERT_TRUE(news && news->is_bad);
  EXPECT_THAT(news->text, HasSubstr("pp=1 dp_replicate=1"));
  EXPECT_THAT(news->text, HasSubstr("worked 4.5 s a step, the ranks beside it "
                                    "3 s: 1.5 times as long"));
  EXPECT_THAT(news->text, HasSubstr("'backward'"));
  EXPECT_FALSE(beside.go(times));
  EXPECT_FALSE(other_stage.go(times));
  EXPECT_EQ(slow.record.slowest_rank, 4);
  EXPECT_DOUBLE_EQ(*slow.record.work_max_s, 4.5);
  EXPECT_DOUBLE_EQ(*slow.record.work_s, 2.5);
  EXPECT_EQ(slow.watch.ranks()[4].slowest_in, StragglerWatch::kSteps);
  EXPECT_DOUBLE_EQ(slow.watch.ranks()[4].work_s, 4.5 * StragglerWatch::kSteps);
  EXPECT_DOUBLE_EQ(slow.watch.ranks()[4].wait_s, 1.5 * StragglerWatch::kSteps);
}

TEST(Stragglers, ItIsToldOnceAndWhenItIsOver) {
  Steps steps{{two_stages_of_three(), 1}};
  const auto slow = [](int64_t) { return std::vector{1., 2., 1., 1., 1., 1.}; };
  const auto even = [](int64_t) { return std::vector<double>(6, 1.0); };
  EXPECT_TRUE(steps.go(slow)->is_bad);
  EXPECT_FALSE(steps.go(slow));
  const auto over = steps.go(even);
  ASSERT_TRUE(over);
  EXPECT_FALSE(over->is_bad);
  EXPECT_FALSE(steps.go(even));
  EXPECT_TRUE(steps.go(slow)->is_bad);
}

TEST(Stragglers, AFewSlowStepsAreNone) {
  Steps steps{{two_stages_of_three(), 1}};
  EXPECT_FALSE(steps.go([](int64_t step) {
    return std::vector{1., step < 8 ? 1.9 : 1., 1., 1., 1., 1.};
  }));
  EXPECT_FALSE(
      steps.go([](int64_t) { return std::vector{1., 1.3, 1., 1., 1., 1.}; }));
}

TEST(Stragglers, OneRankHasNobodyBesideIt) {
  Steps steps{{mesh::DeviceMesh(), 0}};
  EXPECT_FALSE(steps.go([](int64_t) { return std::vector{1.}; }));
  EXPECT_FALSE(steps.record.work_s);
  EXPECT_TRUE(steps.watch.ranks().empty());
}

}  // namespace
}  // namespace tessera::train
