#include "tessera/train/begun_steps.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/monitor/timeline.h"

namespace tessera::train {

BegunSteps::BegunSteps(const engine::RunConfig& config,
                       engine::RankModel& model, engine::Recorder& recorder,
                       Metrics& metrics, const RunCheckpoints& checkpoints,
                       const std::function<bool()>& stop_requested)
    : config_(config),
      model_(model),
      recorder_(recorder),
      metrics_(metrics),
      checkpoints_(checkpoints),
      stop_requested_(stop_requested) {}

void BegunSteps::begin(const Place& place, engine::StepInput input,
                       std::optional<engine::StepInput> next) {
  Begun begun{.place = place, .start = Clock::now()};
  if (begun_.empty() || !begun_.back().is_under_way()) metrics_.begin_step();
  recorder_.begin_step(place.step, accumulation(config_));
  model_.run_step(std::move(input), recorder_.observer(), std::move(next));
  engine::ModelActor& actor = model_.actor();
  if (config_.monitor.losses_late > 0) {
    begun.unread = actor.begin_to_settle();
  } else {
    actor.settle();
  }
  begun.end = Clock::now();
  begun.usage = metrics_.take_usage();
  begun.usage.traffic = begun.usage.traffic + actor.traffic();
  begun.spans = recorder_.take_spans();
  begun_.push_back(std::move(begun));
}

BegunSteps::Finished BegunSteps::finish() {
  Begun begun = std::move(begun_.front());
  begun_.pop_front();
  const auto& [step, lr] = begun.place;
  rank_context().step = step;
  engine::ModelActor& actor = model_.actor();
  const bool was_under_way = begun.is_under_way();
  const bool has_waited = begun.unread && !was_under_way;
  if (begun.unread) actor.settle(*std::move(begun.unread));
  if (was_under_way) {  // what ended since
    begun.usage.traffic = begun.usage.traffic + metrics_.take_usage().traffic;
  }
  const auto start =
      was_under_way ? std::max(begun.start, told_at_) : begun.start;
  const auto step_s = [&] {
    const auto end = has_waited ? begun.end : Clock::now();
    return std::chrono::duration<double>(end - start).count();
  };
  const double until_told_s = step_s();
  StepTotals totals = metrics_.exchange(
      {.loss_sum = actor.loss_sum(),
       .weight = actor.weight(),
       .aux_sum = actor.aux_sum(),
       .ahead_loss = actor.ahead_loss(),
       .expert_counts = actor.expert_counts(),
       .grad_norm = actor.grad_norm(),
       .usage = begun.usage,
       .timeline = monitor::timeline_of(begun.spans, until_told_s),
       .stop = stop_requested_(),
       .is_saving = checkpoints_.is_writing()});
  totals.record.step = step;
  totals.record.lr = lr;
  totals.record.was_skipped = actor.was_skipped();
  if (actor.loss_scale().scales()) totals.record.loss_scale = actor.scale();
  totals.record.step_s = step_s();
  // A share of the step, in which ranks also told each other of it.
  if (totals.record.bubble && totals.record.step_s > 0) {
    *totals.record.bubble *= until_told_s / totals.record.step_s;
  }
  told_at_ = Clock::now();
  return {step, std::move(totals), std::move(begun.spans)};
}

}  // namespace tessera::train
