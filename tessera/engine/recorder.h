// Records a rank's programs as spans, for metrics and for traces.
//
// Lanes: 0 is the rank itself, on which communication is a wait; on the others
//        lies what was begun, from its begin to its await.
// Cost:  two readings of the clock and a span for each instruction.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/monitor/span.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/executor.h"

namespace tessera::engine {

class Recorder {
 public:
  Recorder(const parallel::Composed& composed, int64_t rank);

  // Forgets what was recorded; `step` names the messages that follow. It has so
  // many micro-batches; those behind are the next one's.
  void begin_step(int64_t step, int64_t num_microbatches = INT64_MAX);
  program::Observer observer();
  const std::vector<monitor::Span>& spans() const { return spans_; }
  std::vector<monitor::Span> take_spans() { return std::exchange(spans_, {}); }

  static std::vector<std::string> lanes();

 private:
  void take(const program::Instruction& instruction, double begin_s,
            double end_s);
  // Nothing for what only manages memory.
  std::optional<monitor::SpanKind> kind_of(
      const program::Instruction& instruction) const;
  void add_in_flight(const program::Instruction& instruction, double end_s);
  void mark_message(const program::Instruction& message,
                    monitor::Span& span) const;

  // By the step that it is of.
  program::Instruction in_step(program::Instruction instruction) const;
  void name_operands(const program::Instruction& instruction,
                     monitor::Span& span) const;

  const parallel::Composed& composed_;
  int64_t rank_;
  int64_t step_ = 0, num_microbatches_ = INT64_MAX;
  std::vector<monitor::Span> spans_;
  using Key = std::tuple<program::Op, int64_t, int64_t, int64_t>;
  std::map<Key, double> begun_;         // when, of what is under way
  std::map<int64_t, double> lane_end_;  // of the last span
  double blocked_s_ = 0;  // comm::seconds_blocked() behind the last one
};

}  // namespace tessera::engine
