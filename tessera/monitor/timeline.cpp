#include "tessera/monitor/timeline.h"

#include <algorithm>
#include <numeric>

namespace tessera::monitor {
namespace {

constexpr std::array kCommunication = {SpanKind::kGather, SpanKind::kReduce,
                                       SpanKind::kMessage};

double& at(SecondsByKind& seconds, SpanKind kind) {
  return seconds[static_cast<size_t>(kind)];
}

// What the compute lane stands still for in this span; nothing: it works.
std::optional<SpanKind> awaited_in(const Span& span) {
  if (span.lane != kComputeLane) return std::nullopt;
  if (span.kind == SpanKind::kWait) return span.awaited;
  const bool communicates =
      std::ranges::find(kCommunication, span.kind) != kCommunication.end();
  return communicates ? std::optional(span.kind) : std::nullopt;
}

}  // namespace

double Timeline::exposed_comm_s() const {
  return std::accumulate(exposed.begin(), exposed.end(), 0.0) -
         exposed[static_cast<size_t>(SpanKind::kLoad)] -
         exposed[static_cast<size_t>(SpanKind::kOffload)];
}

Timeline timeline_of(const std::vector<Span>& spans, double step_s) {
  Timeline timeline;
  std::vector<double> own_s;
  for (const Span& span : spans) own_s.push_back(span.end_s - span.begin_s);
  const std::vector<int64_t> parents = parents_of(spans);
  for (size_t i = 0; i < spans.size(); ++i) {
    if (parents[i] >= 0) own_s[parents[i]] -= spans[i].end_s - spans[i].begin_s;
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    const double waited_s = spans[i].waited_s;
    at(timeline.seconds, spans[i].kind) += own_s[i] - waited_s;
    at(timeline.seconds, SpanKind::kWait) += waited_s;
    at(timeline.exposed, spans[i].kind) += waited_s;
    const auto awaited = awaited_in(spans[i]);
    if (awaited) at(timeline.exposed, *awaited) += own_s[i];
  }
  const bool is_pipeline = std::ranges::any_of(spans, [](const Span& span) {
    return span.kind == SpanKind::kMessage ||
           span.awaited == SpanKind::kMessage;
  });
  if (is_pipeline && step_s > 0) {
    timeline.bubble = (at(timeline.exposed, SpanKind::kMessage) +
                       at(timeline.exposed, SpanKind::kNorm)) /
                      step_s;
  }
  return timeline;
}

}  // namespace tessera::monitor
