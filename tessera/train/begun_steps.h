// Steps that have begun, in their order, until their numbers are known: this
// rank is done with them, its device perhaps not (monitor.losses_late).
//
// Comm:   begin() what the parallelism needs; finish() one all_gather
//         (Metrics::exchange()). All ranks alike.
// Clock:  a step's seconds are those from its begin until its numbers are
//         known; of steps that overlap, what each adds.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <vector>

#include "tessera/engine/rank_model.h"
#include "tessera/engine/recorder.h"
#include "tessera/engine/run_config.h"
#include "tessera/monitor/span.h"
#include "tessera/train/metrics.h"
#include "tessera/train/run_checkpoints.h"

namespace tessera::train {

class BegunSteps {
 public:
  // All of these outlive it. `stop_requested`: of this rank.
  BegunSteps(const engine::RunConfig& config, engine::RankModel& model,
             engine::Recorder& recorder, Metrics& metrics,
             const RunCheckpoints& checkpoints,
             const std::function<bool()>& stop_requested);

  // Which step, from 1, and its learning rate.
  struct Place {
    int64_t step = 0;
    double lr = 0;
  };
  // `next`: of the step behind it, where it begins in this one.
  void begin(const Place& place, engine::StepInput input,
             std::optional<engine::StepInput> next);

  int64_t count() const { return std::ssize(begun_); }

  struct Finished {
    int64_t step = 0;
    StepTotals totals;
    std::vector<monitor::Span> spans;
  };
  // Of the oldest one; from here on the model's numbers are its own.
  Finished finish();

 private:
  using Clock = std::chrono::steady_clock;

  struct Begun {
    Place place;
    Clock::time_point start, end;
    Usage usage;
    std::vector<monitor::Span> spans;
    std::optional<engine::ModelActor::Unread> unread;  // none: the actor knows

    // Its numbers are still to come.
    bool is_under_way() const { return unread && unread->numbers; }
  };

  const engine::RunConfig& config_;
  engine::RankModel& model_;
  engine::Recorder& recorder_;
  Metrics& metrics_;
  const RunCheckpoints& checkpoints_;
  const std::function<bool()>& stop_requested_;
  std::deque<Begun> begun_;
  Clock::time_point told_at_;
};

}  // namespace tessera::train
