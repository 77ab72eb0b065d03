#include "tessera/monitor/span.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::monitor {

const char* name_of(SpanKind kind) {
  constexpr std::array<const char*, kNumSpanKinds> kNames = {
      "forward", "backward", "recompute", "loss", "optimizer",
      "gather",  "reduce",   "message",   "norm", "load",
      "offload", "batch",    "wait"};
  return kNames.at(static_cast<size_t>(kind));
}

uint64_t flow_id(int64_t step, int64_t from, int64_t to, int64_t number) {
  const std::array<int64_t, 4> key = {step, from, to, number};
  return hash64(std::as_bytes(std::span(key)));
}

std::vector<int64_t> parents_of(const std::vector<Span>& spans) {
  std::vector<size_t> order(spans.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) {
    return std::tuple(spans[i].lane, spans[i].begin_s, -spans[i].end_s);
  });
  std::vector<int64_t> parents(spans.size(), -1);
  std::vector<size_t> open;  // each lies in the one before
  for (const size_t i : order) {
    const Span& span = spans[i];
    TS_CHECK(span.begin_s <= span.end_s, "monitor: span '", span.name,
             "' ends before it begins.");
    const auto is_over = [&](const Span& other) {
      return other.lane != span.lane || other.end_s <= span.begin_s;
    };
    while (!open.empty() && is_over(spans[open.back()])) open.pop_back();
    if (!open.empty()) {
      const Span& around = spans[open.back()];
      TS_CHECK(span.end_s <= around.end_s, "monitor: on lane ", span.lane,
               " span '", span.name, "' begins in '", around.name,
               "' and ends after it.");
      parents[i] = static_cast<int64_t>(open.back());
    }
    open.push_back(i);
  }
  return parents;
}

}  // namespace tessera::monitor
