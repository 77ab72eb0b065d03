#include "tessera/parallel/pipeline/cut.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace tessera::parallel::pipeline {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

// Sums of the same numbers in another order are no difference.
constexpr double kRounding = 1e-12;
double with_slack(double bound) { return bound * (1 + kRounding); }

using Sums = std::vector<double>;

Sums sums_of(const std::vector<double>& numbers) {
  Sums sums(numbers.size() + 1, 0.0);
  std::partial_sum(numbers.begin(), numbers.end(), sums.begin() + 1);
  return sums;
}

std::vector<double> by_place(std::vector<double> numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] *= static_cast<double>(i);
  }
  return numbers;
}

class Cut {
 public:
  Cut(const UnitCosts& costs, const CutRules& rules)
      : rules_(rules),
        runs_(rules.pipeline.num_runs()),
        layers_(std::ssize(costs.time) - 2),
        time_(sums_of(costs.time)),
        replay_(sums_of(costs.replay)),
        replay_by_place_(sums_of(by_place(costs.replay))),
        state_(sums_of(costs.state_bytes)),
        later_state_(sums_of(costs.later_state_bytes)),
        kept_(sums_of(costs.kept_bytes)) {
    TORCH_INTERNAL_ASSERT(runs_ <= layers_, runs_, " parts of ", layers_,
                          " layers");
  }

  // REQUIRES of all that follows: layers [first, last) are those of `run`.
  double time_of(int64_t run, int64_t first, int64_t last) const {
    return work_of(run, first, last) / speed_of(run);
  }

  // By stage, at speed 1.
  std::vector<double> loads(const std::vector<int64_t>& split) const {
    std::vector<double> loads(rules_.pipeline.stages, 0.0);
    for_each_part(split, [&](int64_t run, int64_t first, int64_t last) {
      for (const int64_t holder : rules_.pipeline.holders_of(run)) {
        loads.at(holder) += work_of(run, first, last);
      }
    });
    return loads;
  }

  // With as many micro-batches alive as in 1F1B, and in PipeDream-2BW.
  double bytes_of(int64_t run, int64_t first, int64_t last) const {
    if (state_.size() != time_.size()) return 0;
    double alive = 1;
    bool is_later = later_state_.size() == time_.size();
    for (const int64_t holder : rules_.pipeline.holders_of(run)) {
      alive =
          std::max(alive, static_cast<double>(rules_.pipeline.stages - holder));
      is_later = is_later && holder > 0;
    }
    return sum(is_later ? later_state_ : state_, run, first, last) +
           alive * sum(kept_, run, first, last);
  }

  std::vector<int64_t> best() const {
    const auto larger = [](double a, double b) { return std::max(a, b); };
    const auto always = [](int64_t, int64_t, int64_t) { return true; };
    const auto time = [this](int64_t run, int64_t first, int64_t last) {
      return time_of(run, first, last);
    };
    const auto bytes = [this](int64_t run, int64_t first, int64_t last) {
      return bytes_of(run, first, last);
    };
    const double most_time = with_slack(search(always, time, larger).value);
    const auto in_time = [=, this](int64_t run, int64_t first, int64_t last) {
      return time_of(run, first, last) <= most_time;
    };
    const double most_bytes = with_slack(search(in_time, bytes, larger).value);
    const auto in_both = [=, this](int64_t run, int64_t first, int64_t last) {
      return in_time(run, first, last) &&
             bytes_of(run, first, last) <= most_bytes;
    };
    const auto square = [this](int64_t run, int64_t first, int64_t last) {
      const double of = time_of(run, first, last);
      return of * of;
    };
    return search(in_both, square, std::plus<>()).split;
  }

  // Ranks of several parts: layers move to where they make the most loaded rank
  // less so, then its most loaded part, then all ranks more even.
  std::vector<int64_t> evened(std::vector<int64_t> split) const {
    Load now = load_of(split);
    for (;;) {
      auto [better, load] = best_move(split, now);
      if (better.empty()) return split;
      split = std::move(better);
      now = load;
    }
  }

 private:
  using Part = std::function<double(int64_t run, int64_t first, int64_t last)>;
  using Allowed = std::function<bool(int64_t run, int64_t first, int64_t last)>;
  using Both = std::function<double(double one, double other)>;

  struct Found {
    double value = kNone;
    std::vector<int64_t> split;
  };

  template <typename Visit>
  void for_each_part(const std::vector<int64_t>& split,
                     const Visit& visit) const {
    int64_t first = 0;
    for (int64_t run = 0; run < runs_; ++run) {
      const int64_t last = first + split.at(run);
      visit(run, first, last);
      first = last;
    }
  }

  int64_t end_of(int64_t run, int64_t last) const {
    return run == runs_ - 1 ? layers_ + 2 : last + 1;
  }
  double sum(const Sums& sums, int64_t run, int64_t first, int64_t last) const {
    const int64_t begin = run == 0 ? 0 : first + 1;
    return sums.at(end_of(run, last)) - sums.at(begin);
  }

  double work_of(int64_t run, int64_t first, int64_t last) const {
    const double once = sum(time_, run, first, last);
    if (replay_.size() != time_.size()) return once;
    const int64_t behind = end_of(run, last) - (run == runs_ - 1 ? 1 : 0);
    return once + static_cast<double>(behind) * sum(replay_, run, first, last) -
           sum(replay_by_place_, run, first, last);
  }

  double speed_at(int64_t stage) const {
    return rules_.speeds.empty() ? 1 : rules_.speeds.at(stage);
  }
  // Of the slowest rank that holds it.
  double speed_of(int64_t run) const {
    double slowest = kNone;
    for (const int64_t holder : rules_.pipeline.holders_of(run)) {
      slowest = std::min(slowest, speed_at(holder));
    }
    return slowest;
  }

  int64_t least(int64_t run) const {
    const bool is_end = run == 0 || run == runs_ - 1;
    return is_end && rules_.bare_ends ? 0 : 1;
  }

  // The least that parts cost together, of all cuts into parts that are
  // allowed. From the last part on: value[run][first] is that of the parts from
  // `run` on, whose layers begin with `first`. Of equals the longest first
  // part, as an even cut has it.
  Found search(const Allowed& allowed, const Part& part,
               const Both& both) const {
    std::vector<std::vector<double>> value(
        runs_ + 1, std::vector<double>(layers_ + 1, kNone));
    std::vector<std::vector<int64_t>> end(runs_,
                                          std::vector<int64_t>(layers_ + 1, 0));
    for (int64_t run = runs_ - 1; run >= 0; --run) {
      const bool is_last = run == runs_ - 1;
      for (int64_t first = 0; first <= layers_; ++first) {
        for (int64_t last = layers_; last >= first + least(run); --last) {
          if (is_last && last < layers_) break;
          if (!is_last && value[run + 1][last] == kNone) continue;
          if (!allowed(run, first, last)) continue;
          double all = part(run, first, last);
          if (!is_last) all = both(all, value[run + 1][last]);
          if (with_slack(all) >= value[run][first]) continue;
          value[run][first] = all;
          end[run][first] = last;
        }
      }
    }
    Found found{.value = value[0][0]};
    TORCH_INTERNAL_ASSERT(found.value < kNone, "no cut is allowed");
    for (int64_t run = 0, first = 0; run < runs_; ++run) {
      found.split.push_back(end[run][first] - first);
      first = end[run][first];
    }
    return found;
  }

  struct Load {
    double rank = 0, part = 0, squares = 0;
    bool less_than(const Load& other) const {
      for (const double Load::* each :
           {&Load::rank, &Load::part, &Load::squares}) {
        if (with_slack(this->*each) < other.*each) return true;
        if (with_slack(other.*each) < this->*each) return false;
      }
      return false;
    }
  };

  Load load_of(const std::vector<int64_t>& split) const {
    Load load;
    for_each_part(split, [&](int64_t run, int64_t first, int64_t last) {
      load.part = std::max(load.part, time_of(run, first, last));
    });
    const auto work = loads(split);
    for (int64_t stage = 0; stage < rules_.pipeline.stages; ++stage) {
      const double time = work[stage] / speed_at(stage);
      load.rank = std::max(load.rank, time);
      load.squares += time * time;
    }
    return load;
  }

  // Nothing where no move of one layer makes it better.
  std::pair<std::vector<int64_t>, Load> best_move(
      const std::vector<int64_t>& split, Load now) const {
    std::pair<std::vector<int64_t>, Load> best{{}, now};
    for (int64_t from = 0; from < runs_; ++from) {
      if (split.at(from) <= least(from)) continue;
      for (int64_t to = 0; to < runs_; ++to) {
        if (to == from) continue;
        auto moved = split;
        --moved.at(from);
        ++moved.at(to);
        const Load load = load_of(moved);
        if (load.less_than(best.second)) best = {std::move(moved), load};
      }
    }
    return best;
  }

  const CutRules& rules_;
  const int64_t runs_, layers_;
  const Sums time_, replay_, replay_by_place_, state_, later_state_, kept_;
};

}  // namespace

std::vector<int64_t> balanced_split(const UnitCosts& costs,
                                    const CutRules& rules) {
  const Cut cut(costs, rules);
  auto split = cut.best();
  const auto& pipeline = rules.pipeline;
  const bool one_part_each = pipeline.chunks == 1;
  return one_part_each ? split : cut.evened(std::move(split));
}

std::vector<double> loads_of(const UnitCosts& costs,
                             const program::Pipeline& pipeline,
                             const std::vector<int64_t>& split) {
  const CutRules rules{.pipeline = pipeline};
  return Cut(costs, rules).loads(split);
}

}  // namespace tessera::parallel::pipeline
