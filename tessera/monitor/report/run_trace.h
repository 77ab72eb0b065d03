// What a run recorded of its steps (monitor.trace), read again.
//
// Errors: TS_CHECK_IO names the file: none there, or not one of a rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/monitor/span.h"

namespace tessera::monitor::report {

// A rank's spans of one step, on the lane that computes, ascending.
struct TracedStep {
  int64_t step = 0;
  std::vector<Span> spans;
};

// By rank: its steps, ascending. `run`: the run's folder.
std::vector<std::vector<TracedStep>> read_trace(const std::string& run);

}  // namespace tessera::monitor::report
