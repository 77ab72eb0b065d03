// The progress line, in torchtitan's manner, with the time that is left:
//
//   step:  10  loss:  7.61234  grad_norm:  1.2345  memory:  0.52GiB(2.17%)
//   tps: 12,345  tflops: 0.12  mfu: 8.10%  eta: 1m20s      (all in one line)
//
// Shown are the first step, every `every`th, the last, and those with a
// validation, which has a line of its own. tps, tflops and mfu are of a rank;
// tflops and mfu are left out where they are unknown.
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
  std::ostream* out = nullptr;         // nullptr: stderr
  std::function<double()> clock = {};  // seconds; empty: a steady clock
};

class Console : public Sink {
 public:
  Console(const RunInfo& info, ConsoleOptions options);
  void step(const StepRecord& record) override;
  void close(const RunEnd& end) override;

 private:
  bool is_shown(const StepRecord& record) const;
  std::string line_of(const StepRecord& record) const;
  std::string validation_line_of(const StepRecord& record) const;
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
