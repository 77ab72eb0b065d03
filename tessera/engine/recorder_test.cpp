#include "tessera/engine/recorder.h"

#include <gtest/gtest.h>

#include "tessera/monitor/timeline.h"

namespace tessera::engine {
namespace {

using monitor::SpanKind;
using program::Op;
using program::Phase;

double of(const monitor::SecondsByKind& seconds, SpanKind kind) {
  return seconds[static_cast<size_t>(kind)];
}

// What is begun and awaited at once waits in its begin: it counts there too.
TEST(Recorder, AllCommunicationOfTheRankItselfIsAWait) {
  parallel::Composed composed;
  composed.units.all = {{.reads = {0}}};
  Recorder recorder(composed, 0);
  recorder.begin_step(1);
  const auto observe = recorder.observer();
  observe({.op = Op::kForward, .microbatch = 0, .unit = 0}, 0, 2);
  observe({.op = Op::kReduceGradients, .unit = 0, .phase = Phase::kBegin}, 2,
          2.5);
  observe({.op = Op::kBackward, .microbatch = 0, .unit = 0}, 2.5, 5);
  observe({.op = Op::kReduceGradients, .unit = 0, .phase = Phase::kAwait}, 5,
          6);
  observe({.op = Op::kNorm}, 6, 6.25);
  observe({.op = Op::kSumNorm, .phase = Phase::kBegin}, 6.25, 9);
  observe({.op = Op::kSumNorm, .phase = Phase::kAwait}, 9, 9);
  const auto timeline = monitor::timeline_of(recorder.spans(), 9);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kReduce), 1.5);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kNorm), 2.75);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kNorm),
            0.25 + 2.75);  // and its lane
  EXPECT_EQ(of(timeline.seconds, SpanKind::kReduce), 4);
  EXPECT_EQ(timeline.exposed_comm_s(), 4.25);
}

// Who reads for others loads; that it travels takes the rank no time.
TEST(Recorder, ABatchThatIsSharedIsLoadedAndThenOnItsWay) {
  parallel::Composed composed;
  composed.units.all = {{.reads = {0}}};
  Recorder recorder(composed, 0);
  recorder.begin_step(1);
  const auto observe = recorder.observer();
  observe({.op = Op::kShareBatch, .phase = Phase::kBegin}, 0, 0.5);
  observe({.op = Op::kForward, .microbatch = 0, .unit = 0}, 0.5, 8);
  observe({.op = Op::kShareBatch, .phase = Phase::kAwait}, 8, 8.25);
  const auto timeline = monitor::timeline_of(recorder.spans(), 9);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kLoad), 0.5);
  EXPECT_EQ(of(timeline.seconds, SpanKind::kBatch), 8.25);
  EXPECT_EQ(of(timeline.exposed, SpanKind::kBatch), 0.25);
  EXPECT_EQ(timeline.exposed_comm_s(), 0.25);
}

}  // namespace
}  // namespace tessera::engine
