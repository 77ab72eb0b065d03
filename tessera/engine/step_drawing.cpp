#include "tessera/engine/step_drawing.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "tessera/core/units.h"
#include "tessera/monitor/report/chart.h"
#include "tessera/monitor/timeline.h"

namespace tessera::engine {

using program::Instruction;
using program::Op;
namespace report = monitor::report;

namespace {

std::optional<report::BoxKind> kind_of(const Instruction& each) {
  using report::BoxKind;
  switch (each.op) {
    case Op::kForward:
      return BoxKind::kForward;
    case Op::kRecompute:
    case Op::kReplay:
      return BoxKind::kRecompute;
    case Op::kBackward:
      return BoxKind::kBackward;
    case Op::kBackwardInput:
      return BoxKind::kBackwardInput;
    case Op::kBackwardWeight:
      return BoxKind::kBackwardWeight;
    case Op::kLoadInputs:
    case Op::kLoadTargets:
    case Op::kLoadDocuments:
      return BoxKind::kLoad;
    case Op::kSumNorm:
      return std::nullopt;
    default:
      break;
  }
  if (program::is_message(each.op)) return std::nullopt;
  return program::is_communication(each.op) || program::is_fetch(each.op)
             ? BoxKind::kCommunication
             : BoxKind::kOther;
}

// What stages sum together waits for them, as a message does.
bool waits_for_stages(const Instruction& each, const program::Units& units) {
  return each.op == Op::kReduceGradients && each.unit >= 0 &&
         units.all.at(each.unit).across_stages;
}

// Units of a chunk that follow each other closely are one box.
void add_box(std::vector<report::Box>& boxes, const Instruction& each,
             program::Timing at, double closely) {
  auto kind = kind_of(each);
  if (!kind || at.end <= at.begin) return;
  if (!boxes.empty()) {
    report::Box& last = boxes.back();
    // The first unit's backward in a split one: all of it is the weights'.
    if (each.op == Op::kBackward && each.unit == 0 &&
        last.kind == report::BoxKind::kBackwardWeight) {
      kind = last.kind;
    }
    at.begin = std::max(at.begin, last.end);
    if (at.end <= at.begin) return;
    if (last.kind == *kind && last.microbatch == each.microbatch &&
        last.chunk == each.chunk && at.begin - last.end <= closely) {
      last.end = at.end;
      return;
    }
  }
  boxes.push_back({at.begin, at.end, *kind, each.microbatch, each.chunk});
}

std::string label_of(const StepPlan& plan, size_t stage) {
  const PlannedStage& of = plan.stages[stage];
  const std::string ranks =
      of.num_ranks == 1 ? c10::str("rank ", of.rank)
                        : c10::str(of.num_ranks, " ranks, as ", of.rank);
  if (plan.stages.size() == 1) return ranks;
  return c10::str("stage ", stage, ": ", ranks);
}

constexpr double kClosely = 1e-3;  // of a step

}  // namespace

std::string amount(double time, const std::string& unit) {
  if (unit == "s") return seconds_text(time);
  return report::short_number(time) + (unit.empty() ? "" : " " + unit);
}

namespace {

// What is drawn of a stage: all of its steps, or, of those that go on without a
// flush, the one that the plan's numbers are of.
program::Timing drawn_of(const StepPlan& plan, const PlannedStage& stage,
                         bool one_of_many) {
  if (!one_of_many) return {0, std::numeric_limits<double>::infinity()};
  return {stage.times.step_ends.at(plan.steps - 3).time,
          stage.times.step_ends.at(plan.steps - 2).time};
}

}  // namespace

report::Panel panel_of(const StepPlan& plan, bool one_step) {
  const bool goes_on = plan.steps > 1;
  const bool one_of_many = goes_on && one_step;
  report::Panel panel;
  panel.title = c10::str(
      plan.schedule, ": predicted ", amount(plan.step, plan.unit), ", bubble ",
      percent(plan.bubble),
      one_of_many ? ", drawn one step between others"
      : goes_on ? c10::str(", drawn ", plan.steps, " steps from fill to flush")
                : "");
  // Micro-batches are counted on from step to step.
  int64_t last = 0;
  for (const auto& each : plan.stages.front().program) {
    last = std::max(last, each.microbatch);
  }
  const int64_t in_step = one_of_many ? (last + 1) / plan.steps : last + 1;
  double start = std::numeric_limits<double>::infinity();
  for (const PlannedStage& stage : plan.stages) {
    start = std::min(start, drawn_of(plan, stage, one_of_many).begin);
  }
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const PlannedStage& stage = plan.stages[i];
    const auto drawn = drawn_of(plan, stage, one_of_many);
    report::Row row{.label = label_of(plan, i), .boxes = {}, .note = {}};
    for (size_t at = 0; at < stage.program.size(); ++at) {
      program::Timing time = stage.times.at[at];
      if (waits_for_stages(stage.program[at], stage.units) ||
          time.begin < drawn.begin || time.end > drawn.end) {
        continue;
      }
      time.begin -= start;
      time.end -= start;
      Instruction each = stage.program[at];
      if (each.microbatch >= 0) each.microbatch %= in_step;
      add_box(row.boxes, each, time, kClosely * plan.step);
    }
    const double step = plan.step > 0 ? plan.step : 1;
    row.note = c10::str("bubble ", percent(stage.times.bubble / step), ", ",
                        bytes_text(stage.peak_bytes));
    panel.rows.push_back(std::move(row));
  }
  return panel;
}

namespace {

struct Interval {
  double begin = 0, end = 0;
};

Interval whole_of(const TracedRanks& traced, size_t step) {
  Interval whole{traced[0].at(step).spans.front().begin_s, 0};
  for (const auto& rank : traced) {
    for (const auto& span : rank.at(step).spans) {
      whole.begin = std::min(whole.begin, span.begin_s);
      whole.end = std::max(whole.end, span.end_s);
    }
  }
  return whole;
}

// Of the steps that all ranks have: the one of median length.
size_t median_step(const TracedRanks& traced) {
  size_t count = traced[0].size();
  for (const auto& rank : traced) count = std::min(count, rank.size());
  std::vector<size_t> steps(count);
  for (size_t i = 0; i < count; ++i) steps[i] = i;
  std::ranges::sort(steps, {}, [&](size_t step) {
    const Interval whole = whole_of(traced, step);
    return whole.end - whole.begin;
  });
  return steps[count / 2];
}

}  // namespace

report::Panel panel_of(const TracedRanks& traced, const StepPlan& plan) {
  const size_t median = median_step(traced);
  const auto whole = whole_of(traced, median);
  const double step_s = whole.end - whole.begin;
  double bubble = 0;
  report::Panel panel;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const auto& spans = traced.at(plan.stages[i].rank).at(median).spans;
    report::Row row{.label = label_of(plan, i), .boxes = {}, .note = {}};
    for (const auto& span : spans) {
      const auto each = instruction_of(span);
      if (!each || each->phase == program::Phase::kBegin ||
          span.awaited == monitor::SpanKind::kMessage) {
        continue;
      }
      add_box(row.boxes, *each,
              {span.begin_s - whole.begin, span.end_s - whole.begin},
              kClosely * step_s);
    }
    const double share = monitor::timeline_of(spans, step_s).bubble;
    bubble += share / static_cast<double>(plan.stages.size());
    row.note = "bubble " + percent(share);
    panel.rows.push_back(std::move(row));
  }
  panel.title = c10::str("measured, step ", traced[0].at(median).step, ": ",
                         seconds_text(step_s), ", bubble ", percent(bubble));
  return panel;
}

}  // namespace tessera::engine
