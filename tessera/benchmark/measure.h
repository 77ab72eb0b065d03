// The measurement behind `tessera bench comm`.
//
// A row is one case (operation, type, reduction, size) on every series that
// serves it; a series' part of it is a cell. Series take turns, a few timings
// each, so that the ratio of two of them is one of the same moment.
// Timing: every rank rewrites its buffers, all meet, each takes the time of its
//         own calls (several in a row where one is short: exchange.h). A cell's
//         time is the average over ranks of the median over timings.
// Right:  all elements of the last results of each turn are compared with what
//         they should be; wrong ones are summed over ranks.
// State:  rank 0 measures the round trip of a cache line just before and just
//         after each row, while the others wait.
// Comm:   a communicator for each series, and `control` for meeting.
// Errors: what the communicators throw.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/benchmark/exchange.h"
#include "tessera/benchmark/operation.h"
#include "tessera/benchmark/series.h"
#include "tessera/comm/communicator.h"

namespace tessera::benchmark {

struct Plan {
  std::vector<Series> series = {Series{}};
  std::vector<Operation> operations = all_operations();
  std::vector<at::ScalarType> dtypes = {at::kFloat};
  std::vector<comm::ReduceOp> redops = {comm::ReduceOp::kSum};
  std::vector<int64_t> sizes;  // bytes
  int64_t timings = 0;         // a cell; 0: as many as `seconds` hold
  double seconds = 0.2;
  int64_t warmup = 2;  // timings that do not count
  bool check = true;
};

// From `first` to `last` bytes, each `factor` times the one before.
std::vector<int64_t> sizes_between(int64_t first, int64_t last, int64_t factor);

struct Cell {
  Series series;
  double time_us = 0;      // average over ranks of the median over timings
  double min_rank_us = 0;  // the median of the fastest rank
  double max_rank_us = 0;  // and of the slowest
  double best_us = 0;      // average over ranks of the fastest timing
  int64_t timings = 0;
  int64_t calls = 0;             // in a timing
  std::optional<int64_t> wrong;  // elements; nothing: not checked
};

struct Row {
  Case what;
  int64_t ranks = 0;
  Counts counts;
  int64_t bytes = 0;  // S
  // Of a cache line between two cores; on rank 0.
  std::optional<double> trip_before_ns, trip_after_ns;
  std::vector<Cell> cells;  // in the order of Plan::series

  double algbw(const Cell& cell) const;  // GB/s
  double busbw(const Cell& cell) const;
};

// How the ranks of a run meet.
struct Ranks {
  comm::Communicator& control;
  std::function<std::unique_ptr<comm::Communicator>(const Series& series)> make;
};

// Runs the plan; all ranks alike. `done` hears of the rows of each operation.
void measure(const Plan& plan, const Ranks& ranks,
             const std::function<void(const std::vector<Row>&)>& done);

// The most bytes that a rank's buffers and values take at a time.
int64_t bytes_of_rank(const Plan& plan, int64_t ranks);

}  // namespace tessera::benchmark
