// The progress line, in torchtitan's manner, with the time that is left:
//
//   step:  10/1000  loss:  7.61234  lr: 3.00e-04  grad_norm:  1.2345
//   tokens: 40,960  epoch: 0.02  tokens/s: 24,690 (12,345 a rank)
//   mfu: 8.10%  memory:  0.52GiB(2.17%)  left: 1m20s     (all in one line)
//
// Shown are the first step, every `every`th, the last, and those with a
// validation or a sample, which have lines of their own. Tokens and epochs are
// those of the whole run so far; epoch and mfu are left out where they are
// unknown. The time left is judged by the last 100 steps, with what lies
// between them.
// Units:  memory of the worst rank, and its share of the host's.
#pragma once

#include <deque>
#include <functional>
#include <iosfwd>
#include <string>

#include "tessera/monitor/sink.h"

namespace tessera::monitor {

// Set by a launcher that shows this process's stderr on a terminal.
inline constexpr const char* kTerminalVariable = "TESSERA_TERMINAL";

// stderr ends at a terminal, and NO_COLOR is not set.
bool wants_colour();

struct ConsoleOptions {
  int64_t every = 1;
  bool colour = wants_colour();
  std::ostream* out = nullptr;         // nullptr: the screen
  std::function<double()> clock = {};  // seconds; empty: a steady clock
};

class Console : public Sink {
 public:
  Console(const RunInfo& info, ConsoleOptions options);
  void validated_at_start(const Validation& validation) override;
  void step(const StepRecord& record) override;
  void close(const RunEnd& end) override;

 private:
  void show(const std::string& line) const;
  bool is_shown(const StepRecord& record) const;
  std::string line_of(const StepRecord& record) const;
  std::string validation_line_of(int64_t step, const Validation& valid) const;
  std::string sample_lines_of(int64_t step, const Sample& sample) const;
  // Of the world, and of a rank where there are several.
  std::string rate_of(double tokens_per_s) const;
  std::string memory_of(const StepRecord& record) const;
  double seconds_left(const StepRecord& record) const;

  RunInfo info_;
  ConsoleOptions options_;
  std::deque<double> times_;  // of the last steps, oldest first
};

// "45s", "1m20s", "2h05m", "3d04h".
std::string format_duration(double seconds);
// 1234567 as "1,234,567".
std::string with_commas(int64_t value);

}  // namespace tessera::monitor
