#include "tessera/monitor/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace tessera::monitor {
namespace {

using ::testing::ElementsAre;

Span on(int64_t lane, SpanKind kind, double begin, double end,
        SpanKind awaited = SpanKind::kWait) {
  Span span;
  span.name = name_of(kind);
  span.kind = kind;
  span.awaited = awaited;
  span.lane = lane;
  span.begin_s = 100 + begin;
  span.end_s = 100 + end;
  return span;
}

double of(const SecondsByKind& seconds, SpanKind kind) {
  return seconds[static_cast<size_t>(kind)];
}

TEST(Timeline, OfNothingIsNothing) {
  const Timeline timeline = timeline_of({}, 0);
  EXPECT_EQ(timeline.bubble, 0);
  EXPECT_EQ(timeline.exposed_comm_s(), 0);
}

TEST(Timeline, AddsUpByKindOverAllLanes) {
  const Timeline timeline = timeline_of(
      {on(0, SpanKind::kForward, 0, 1), on(0, SpanKind::kForward, 1, 3),
       on(0, SpanKind::kLoss, 3, 3.5), on(1, SpanKind::kGather, 0, 2),
       on(0, SpanKind::kOptimizer, 4, 5)},
      8);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kForward), 3);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kLoss), 0.5);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kGather), 2);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kOptimizer), 1);
  EXPECT_EQ(timeline.exposed_comm_s(), 0);
  EXPECT_EQ(timeline.bubble, 0);
}

TEST(Timeline, ASpanCountsWithoutThoseInsideOfIt) {
  const Timeline timeline = timeline_of(
      {on(0, SpanKind::kBackward, 0, 10), on(0, SpanKind::kRecompute, 0, 4),
       on(0, SpanKind::kWait, 1, 2, SpanKind::kGather),
       on(0, SpanKind::kRecompute, 6, 7), on(1, SpanKind::kGather, 0.5, 2)},
      10);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kBackward), 5);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kRecompute), 4);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kWait), 1);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kGather), 1);
  EXPECT_EQ(timeline.exposed_comm_s(), 1);
}

// Communication on the compute lane keeps it from computing, whole; on a lane
// of its own only while it is awaited.
TEST(Timeline, ExposedIsWhatTheComputeLaneWaitsFor) {
  const Timeline timeline = timeline_of(
      {on(0, SpanKind::kGather, 0, 1), on(0, SpanKind::kForward, 1, 4),
       on(1, SpanKind::kReduce, 2, 6),
       on(0, SpanKind::kWait, 4, 6, SpanKind::kReduce),
       on(0, SpanKind::kNorm, 6, 7),
       on(0, SpanKind::kWait, 6.5, 6.75, SpanKind::kNorm),
       on(0, SpanKind::kWait, 7, 9, SpanKind::kLoad)},
      10);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kGather), 1);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kReduce), 2);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kNorm), 0.25);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kLoad), 2);
  EXPECT_EQ(timeline.exposed_comm_s(), 3.25);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kNorm), 0.75);
  EXPECT_EQ(timeline.bubble, 0);  // no pipeline
}

// GPipe by two stages, two micro-batches, forward 1 s and backward 2 s: of the
// 9 s each stage is idle for 3, whether it waits for a message or, ahead of the
// others, for the sum of the norm.
TEST(Timeline, TheBubbleOfGPipe) {
  const std::vector<Span> first = {
      on(0, SpanKind::kForward, 0, 1), on(0, SpanKind::kForward, 1, 2),
      on(0, SpanKind::kWait, 2, 5, SpanKind::kMessage),
      on(0, SpanKind::kBackward, 5, 7), on(0, SpanKind::kBackward, 7, 9)};
  const std::vector<Span> last = {
      on(0, SpanKind::kMessage, 0, 1),
      on(0, SpanKind::kForward, 1, 2),
      on(0, SpanKind::kForward, 2, 3),
      on(0, SpanKind::kBackward, 3, 5),
      on(0, SpanKind::kBackward, 5, 7),
      on(0, SpanKind::kNorm, 7, 9),
      on(0, SpanKind::kWait, 7, 9, SpanKind::kNorm)};
  for (const auto& spans : {first, last}) {
    EXPECT_DOUBLE_EQ(timeline_of(spans, 9).bubble, 3.0 / 9);
  }
}

TEST(Timeline, ParentsAreOfTheLaneAndInnermost) {
  EXPECT_THAT(
      parents_of({on(0, SpanKind::kBackward, 0, 10),
                  on(0, SpanKind::kWait, 2, 3), on(1, SpanKind::kGather, 1, 4),
                  on(0, SpanKind::kRecompute, 1, 4),
                  on(0, SpanKind::kForward, 10, 11),
                  on(0, SpanKind::kForward, 10, 11)}),
      ElementsAre(-1, 3, -1, 0, -1, 4));
}

TEST(SpanKind, EachHasAName) {
  for (size_t i = 0; i < kNumSpanKinds; ++i) {
    EXPECT_STRNE(name_of(static_cast<SpanKind>(i)), "");
  }
  EXPECT_STREQ(name_of(SpanKind::kWait), "wait");
}

}  // namespace
}  // namespace tessera::monitor
