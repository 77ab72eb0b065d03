// A slice of a rank's timeline: what it did, from when to when.
//
// A lane is what runs by itself beside others: the thread that computes, and
// whoever brings communication on. On one lane spans follow one another or lie
// inside one another (recomputation inside of a backward).
// Units:  seconds of CLOCK_MONOTONIC, which all processes of a host share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::monitor {

enum class SpanKind {
  kForward,
  kBackward,
  kRecompute,
  kLoss,
  kOptimizer,
  kGather,   // of parameters
  kReduce,   // of gradients
  kMessage,  // between the stages of a pipeline
  kNorm,
  kLoad,
  kOffload,  // from files
  kBatch,    // samples that another rank reads
  kWait,
};
inline constexpr size_t kNumSpanKinds = 13;
using SecondsByKind = std::array<double, kNumSpanKinds>;

const char* name_of(SpanKind kind);  // "forward"

inline constexpr int64_t kComputeLane = 0;

struct Span {
  std::string name;
  SpanKind kind = SpanKind::kForward;
  SpanKind awaited = SpanKind::kWait;  // of a kWait: what it waits for
  int64_t lane = kComputeLane;
  double begin_s = 0;
  double end_s = 0;
  // Of what is no communication: in which it waited for others inside, as
  // tensor parallelism does. When is not known.
  double waited_s = 0;
  // A message that starts or ends in this span: see flow_id().
  std::optional<uint64_t> flow = {};
  bool starts_flow = false;
  // As {"unit", 3}, {"bytes", 4096}; names are literals.
  std::vector<std::pair<const char*, int64_t>> args = {};
};

// The same number on both ends of a message: the number-th of a step that
// `from` sends to `to`.
uint64_t flow_id(int64_t step, int64_t from, int64_t to, int64_t number);

// By span: the innermost span of its lane that it lies in, or -1. Refuses spans
// of a lane that overlap in part, by name.
std::vector<int64_t> parents_of(const std::vector<Span>& spans);

}  // namespace tessera::monitor
