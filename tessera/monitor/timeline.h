// Where a rank's step went: a pure function of its spans.
//
// A span counts without the spans that lie inside it, so that a lane's seconds
// add up to no more than the step. Lanes run beside one another: their sum may
// be more.
// Exposed is communication that the compute lane waits for: its kWait spans, by
// what they wait for, what it sends and receives itself (kGather, kReduce,
// kMessage on that lane), and what is waited for inside of other spans, by
// their kind: of a kForward, the collectives of tensor, context and expert
// parallelism.
// Units:  seconds; the bubble is a share of the step.
#pragma once

#include <vector>

#include "tessera/monitor/span.h"

namespace tessera::monitor {

struct Timeline {
  SecondsByKind seconds{};  // of all lanes
  SecondsByKind exposed{};  // of the compute lane
  // In which the compute lane has nothing to do, as other stages of the
  // pipeline are not that far: it waits for a message, or, where there are
  // messages, for the sum of the norm, one number that all stages add to.
  double bubble = 0;

  // Of all kinds but kLoad and kOffload, which wait for no rank.
  double exposed_comm_s() const;
};

// `step_s`: the whole step, also what no span covers.
Timeline timeline_of(const std::vector<Span>& spans, double step_s);

}  // namespace tessera::monitor
