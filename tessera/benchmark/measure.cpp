#include "tessera/benchmark/measure.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <list>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/processor.h"

namespace tessera::benchmark {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kTurns = 5;
constexpr int64_t kFewestTimings = 5;
constexpr int64_t kMostTimings = 2000;
constexpr int64_t kMostCalls = 16;  // in a timing
constexpr int64_t kBytesATiming = 256 << 10;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start)
      .count();
}

int64_t calls_a_timing(const Case& what) {
  const int64_t bytes = std::max<int64_t>(1, what.bytes);
  return std::clamp<int64_t>(kBytesATiming / bytes, 1, kMostCalls);
}

double over_ranks(comm::Group& group, double value, comm::ReduceOp op) {
  const at::Tensor all = at::full({1}, value, at::kDouble);
  group.all_reduce(all, op).synchronize();
  return all.item<double>();
}

// One series at one case: the timings that it collects, turn by turn.
class Runner {
 public:
  Runner(const Plan& plan, const Case& what, const Pattern& pattern,
         const Series& series, comm::Communicator& ranks, comm::Group& control)
      : plan_(plan),
        series_(series),
        control_(control),
        calls_(calls_a_timing(what)),
        exchange_(
            what, ranks.world(), pattern,
            [&](int64_t numel, at::ScalarType type) {
              return series.registered ? ranks.empty({numel}, type)
                                       : at::empty({numel}, type);
            },
            calls_) {}

  // Agrees with the other ranks on the number of timings.
  void warm_up() {
    double cost_us = 0;
    for (int64_t i = 0; i <= plan_.warmup; ++i) {
      const auto start = Clock::now();
      time_once();
      cost_us = us_since(start);
    }
    check();
    const double slowest_us =
        std::max(1.0, over_ranks(control_, cost_us, comm::ReduceOp::kMax));
    const double fitting = plan_.seconds * 1e6 / slowest_us;
    timings_ = plan_.timings > 0 ? plan_.timings
                                 : static_cast<int64_t>(std::clamp<double>(
                                       fitting, kFewestTimings, kMostTimings));
  }

  void take_turn(int64_t turn) {
    const int64_t first = timings_ * turn / kTurns;
    const int64_t last = timings_ * (turn + 1) / kTurns;
    for (int64_t i = first; i < last; ++i) times_us_.push_back(time_once());
    if (last > first) check();
  }

  Cell conclude() {
    std::sort(times_us_.begin(), times_us_.end());
    const double median = times_us_[times_us_.size() / 2];
    Cell cell;
    cell.series = series_;
    cell.timings = timings_;
    cell.calls = calls_;
    cell.time_us = over_ranks(control_, median, comm::ReduceOp::kMean);
    cell.min_rank_us = over_ranks(control_, median, comm::ReduceOp::kMin);
    cell.max_rank_us = over_ranks(control_, median, comm::ReduceOp::kMax);
    cell.best_us =
        over_ranks(control_, times_us_.front(), comm::ReduceOp::kMean);
    if (plan_.check) {
      const at::Tensor wrong = at::full({1}, wrong_, at::kLong);
      control_.all_reduce(wrong).synchronize();
      cell.wrong = wrong.item<int64_t>();
    }
    return cell;
  }

 private:
  double time_once() {
    exchange_.rewrite();
    control_.barrier();
    const auto start = Clock::now();
    exchange_.call();
    return us_since(start) / static_cast<double>(calls_);
  }

  void check() {
    if (plan_.check) wrong_ += exchange_.count_wrong();
  }

  const Plan& plan_;
  const Series& series_;
  comm::Group& control_;
  const int64_t calls_;
  Exchange exchange_;
  int64_t timings_ = 0;
  int64_t wrong_ = 0;
  std::vector<double> times_us_;
};

class Measurement {
 public:
  Measurement(const Plan& plan, const Ranks& ranks)
      : plan_(plan),
        control_(ranks.control.world()),
        pattern_(largest_tensor(plan, ranks.control.world_size()),
                 ranks.control.world_size()) {
    for (const Series& series : plan.series) {
      communicators_.push_back(ranks.make(series));
    }
  }

  std::vector<Row> rows_of(Operation operation) {
    std::vector<Row> rows;
    for (const at::ScalarType dtype : plan_.dtypes) {
      for (const comm::ReduceOp redop : plan_.redops) {
        for (const int64_t bytes : plan_.sizes) {
          rows.push_back(row_of({operation, dtype, redop, bytes}));
          if (operation == Operation::kBarrier) return rows;
        }
        if (!reduces(operation)) break;
      }
    }
    return rows;
  }

  // Elements of the largest tensor of any case.
  static int64_t largest_tensor(const Plan& plan, int64_t ranks) {
    int64_t largest = 0;
    for (const at::ScalarType dtype : plan.dtypes) {
      const auto width = static_cast<int64_t>(at::elementSize(dtype));
      for (const int64_t bytes : plan.sizes) {
        largest = std::max({largest, bytes / width, ranks});
      }
    }
    return largest;
  }

 private:
  Row row_of(const Case& what) {
    Row row;
    row.what = what;
    row.ranks = control_.size();
    const auto width = static_cast<int64_t>(at::elementSize(what.dtype));
    row.counts = counts_of(what.operation, what.bytes, width, row.ranks);
    row.bytes = row.counts.size * width;
    std::list<Runner> runners;  // hold references: they stay where they are
    for (size_t i = 0; i < communicators_.size(); ++i) {
      if (!plan_.series[i].serves(what.operation)) continue;
      runners.emplace_back(plan_, what, pattern_, plan_.series[i],
                           *communicators_[i], control_);
      runners.back().warm_up();
    }
    row.trip_before_ns = round_trip();
    for (int64_t turn = 0; turn < kTurns; ++turn) {
      for (Runner& runner : runners) runner.take_turn(turn);
    }
    row.trip_after_ns = round_trip();
    for (Runner& runner : runners) row.cells.push_back(runner.conclude());
    return row;
  }

  std::optional<double> round_trip() {
    control_.barrier();
    std::optional<double> trip_ns;
    if (control_.rank() == 0) trip_ns = cache_line_round_trip_ns();
    control_.barrier();
    return trip_ns;
  }

  const Plan& plan_;
  comm::Group& control_;
  const Pattern pattern_;
  std::vector<std::unique_ptr<comm::Communicator>> communicators_;
};

}  // namespace

std::vector<int64_t> sizes_between(int64_t first, int64_t last,
                                   int64_t factor) {
  TORCH_INTERNAL_ASSERT(first > 0 && factor > 1);
  std::vector<int64_t> sizes;
  for (int64_t size = first; size <= last; size *= factor) {
    sizes.push_back(size);
    if (size > std::numeric_limits<int64_t>::max() / factor) break;
  }
  return sizes;
}

double Row::algbw(const Cell& cell) const {
  return static_cast<double>(bytes) / (cell.time_us * 1e3);
}

double Row::busbw(const Cell& cell) const {
  return algbw(cell) * bus_factor(what.operation, ranks);
}

void measure(const Plan& plan, const Ranks& ranks,
             const std::function<void(const std::vector<Row>&)>& done) {
  Measurement measurement(plan, ranks);
  for (const Operation operation : plan.operations) {
    done(measurement.rows_of(operation));
  }
}

int64_t bytes_of_rank(const Plan& plan, int64_t ranks) {
  const int64_t hashes = Measurement::largest_tensor(plan, ranks);
  const int64_t largest =
      plan.sizes.empty()
          ? 0
          : *std::max_element(plan.sizes.begin(), plan.sizes.end());
  const int64_t a_set = 2 * std::max(largest, kBytesATiming);
  return hashes + static_cast<int64_t>(plan.series.size()) * a_set;
}

}  // namespace tessera::benchmark
