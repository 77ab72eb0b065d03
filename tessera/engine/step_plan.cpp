#include "tessera/engine/step_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/step_programs.h"
#include "tessera/models/model.h"
#include "tessera/monitor/report/chart.h"
#include "tessera/monitor/timeline.h"
#include "tessera/parallel/compose.h"
#include "tessera/program/schedules/equal_stages.h"

namespace tessera::engine {

using mesh::Axis;
using program::Instruction;
using program::Op;
using program::Purpose;

namespace {

namespace report = monitor::report;

std::string percent(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * share);
  return text.data();
}

// What a span or an instruction of this name does.
std::optional<Op> op_named(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Op::kReleaseParameters); ++i) {
    if (name == program::name_of(static_cast<Op>(i))) {
      return static_cast<Op>(i);
    }
  }
  return std::nullopt;
}

// As program::describe() wrote it.
std::optional<Instruction> instruction_of(const monitor::Span& span) {
  std::string words = span.name;
  Instruction each;
  for (const auto& [word, phase] :
       {std::pair("begin ", program::Phase::kBegin),
        std::pair("await ", program::Phase::kAwait)}) {
    if (!words.starts_with(word)) continue;
    each.phase = phase;
    words = words.substr(std::string(word).size());
  }
  const auto op = op_named(words.substr(0, words.find(' ')));
  if (!op) return std::nullopt;
  each.op = *op;
  for (const auto& [name, value] : span.args) {
    const std::string key = name;
    if (key == "microbatch") each.microbatch = value;
    if (key == "unit") each.unit = value;
    if (key == "chunk") each.chunk = value;
  }
  return each;
}

// The ranks of a mesh as a world of programs. Ranks of a stage run one program;
// what it moves depends on their place along tp alone.
class PlannedWorld {
 public:
  explicit PlannedWorld(const RunConfig& config)
      : config_(config),
        mesh_(config.mesh.mesh(implied_world_size(config), config.zero.stage)),
        lanes_(mesh_) {
    const auto model = models::make_model(config.model);
    parallel::place(*model, mesh_, config);
    units_ = parallel::model_units(*model, mesh_, config);
    for (int64_t stage = 0; stage < stages(); ++stage) {
      programs_by_stage_.push_back(lowered_program(
          config, mesh_, units_, stage, Purpose::kTraining, passes_chosen()));
    }
    for (int64_t rank = 0; rank < mesh_.world_size(); ++rank) add(rank);
    world_.pipeline = lanes_.along({Axis::kPp});
    world_.lanes = lanes_.names();
    world_.members = [this](int64_t rank, int64_t lane) {
      return lanes_.members(rank, lane);
    };
  }
  PlannedWorld(const PlannedWorld&) = delete;
  PlannedWorld& operator=(const PlannedWorld&) = delete;

  const program::World& world() const { return world_; }
  const mesh::DeviceMesh& mesh() const { return mesh_; }
  int64_t stages() const { return mesh_.degree(Axis::kPp); }
  int64_t stage_of(int64_t rank) const {
    return mesh_.coord_of(rank)[Axis::kPp];
  }
  int64_t first_rank_of(int64_t stage) const {
    mesh::Coord coord = mesh_.coord_of(0);
    coord[Axis::kPp] = stage;
    return mesh_.rank_at(coord);
  }
  program::Units units_of(int64_t rank) const {
    return units_.units_of(mesh_, rank);
  }
  const program::RankFacts& facts_of(int64_t rank) const {
    return facts_.at(key_of(rank));
  }

 private:
  using Key = std::pair<int64_t, int64_t>;  // along pp and tp
  Key key_of(int64_t rank) const {
    const mesh::Coord coord = mesh_.coord_of(rank);
    return {coord[Axis::kPp], coord[Axis::kTp]};
  }

  void add(int64_t rank) {
    const Key key = key_of(rank);
    const auto [found, is_new] = programs_.try_emplace(key);
    world_.programs.push_back(&found->second);
    if (!is_new) return;
    found->second = transfers_of(config_, mesh_, units_, rank, lanes_);
    found->second.program = programs_by_stage_.at(key.first);
    facts_[key] = {engine::facts_of(config_, mesh_, mesh_.coord_of(rank)),
                   units_.units_of(mesh_, rank)};
  }

  const RunConfig& config_;
  const mesh::DeviceMesh mesh_;
  parallel::Lanes lanes_;
  parallel::ModelUnits units_;
  std::vector<program::Program> programs_by_stage_;
  std::map<Key, program::RankProgram> programs_;
  std::map<Key, program::RankFacts> facts_;
  program::World world_;
};

// Operations in units of the mean forward of a stage.
program::Device unit_device(const PlannedWorld& ranks) {
  double flops = 0;
  for (int64_t stage = 0; stage < ranks.stages(); ++stage) {
    const auto& of = ranks.facts_of(ranks.first_rank_of(stage));
    for (const auto& chunk : of.units.chunks) {
      for (int64_t unit : chunk) {
        flops += static_cast<double>(of.facts.units.at(unit).forward.total());
      }
    }
  }
  return {.flops = std::max(1.0, flops / static_cast<double>(ranks.stages()))};
}

program::Work table_of(const PlannedWorld& ranks, const program::Times& times,
                       int64_t passes) {
  std::vector<program::Units> units;
  for (int64_t stage = 0; stage < ranks.stages(); ++stage) {
    units.push_back(ranks.units_of(ranks.first_rank_of(stage)));
  }
  const std::vector<program::Times> stages(ranks.stages(), times);
  return program::work_of_stages(
      stages, std::move(units), passes,
      [&ranks](int64_t rank) { return ranks.stage_of(rank); });
}

using Kind = std::tuple<Op, int64_t, int64_t>;  // with unit and chunk

// That the ranks ran what is planned for them.
void check_traced(const program::Measured& measured, const PlannedWorld& of) {
  for (const auto& [rank, times] : measured) {
    std::set<Kind> seen;
    for (const auto& [each, seconds] : times) {
      seen.insert({each.op, each.unit, each.chunk});
    }
    for (const auto& each : of.world().programs.at(rank)->program) {
      TS_CHECK_CONFIG(!program::is_compute(each.op) ||
                          seen.contains({each.op, each.unit, each.chunk}),
                      "--trace: rank ", rank, " of that run never did ",
                      program::describe(each),
                      ", as a rank of this configuration does. Use the "
                      "config.json in the run's folder.");
    }
  }
}

program::Work traced_work(const TracedRanks& traced, const PlannedWorld& of) {
  TS_CHECK_CONFIG(std::ssize(traced) == of.mesh().world_size(),
                  "--trace: that run had ", traced.size(),
                  " ranks, but this configuration has ", of.mesh().world_size(),
                  ".");
  program::Measured measured;
  for (size_t rank = 0; rank < traced.size(); ++rank) {
    auto& times = measured[static_cast<int64_t>(rank)];
    for (const auto& step : traced[rank]) {
      for (const auto& span : step.spans) {
        const auto each = instruction_of(span);
        if (!each || each->phase == program::Phase::kAwait) continue;
        times.emplace_back(*each, span.end_s - span.begin_s);
      }
    }
  }
  check_traced(measured, of);
  return program::work_of_measured(measured);
}

// Of what lies along several axes the slowest.
program::Link link_of(const std::string& lane,
                      const std::map<std::string, program::Link>& links) {
  const auto others = links.find("");
  std::optional<program::Link> found;
  for (size_t i = 0; i < mesh::kNumAxes; ++i) {
    const char* const axis = mesh::kAxisTable[i].name;
    const auto link = links.find(axis);
    if (link == links.end() ||
        ("+" + lane + "+").find(c10::str("+", axis, "+")) == lane.npos) {
      continue;
    }
    if (!found) found = link->second;
    found->latency = std::max(found->latency, link->second.latency);
    found->bytes_per_time =
        std::min(found->bytes_per_time, link->second.bytes_per_time);
  }
  if (found) return *found;
  return others == links.end() ? program::Link{} : others->second;
}

program::Costs costs_of(const RunConfig& config, const PlanCosts& of,
                        const PlannedWorld& ranks, StepPlan& plan) {
  program::Costs costs;
  costs.message_element_bytes =
      static_cast<int64_t>(c10::elementSize(config.precision.compute_dtype()));
  for (const auto& lane : ranks.world().lanes) {
    costs.links.push_back(link_of(lane, of.links));
  }
  const auto facts_of = [&ranks](int64_t rank) -> const program::RankFacts& {
    return ranks.facts_of(rank);
  };
  if (of.stages) {
    const int64_t stages = ranks.stages();
    costs.work = table_of(ranks, *of.stages,
                          config.pipeline.pipeline(stages).num_runs() / stages);
    costs.links.at(ranks.world().pipeline).latency += of.message;
    plan.costs = "given for every stage";
  } else if (of.device) {
    costs.work = program::work_of_device(*of.device, facts_of);
    plan.unit = "s";
    plan.costs = "operations and bytes over a device's rates";
  } else if (of.traced != nullptr) {
    costs.work = traced_work(*of.traced, ranks);
    plan.unit = "s";
    plan.costs = "means of the traced steps";
  } else {
    costs.work = program::work_of_device(unit_device(ranks), facts_of);
    plan.unit = "forwards";
    plan.costs = "operations; 1 is a micro-batch's forward on a mean stage";
  }
  return costs;
}

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

StepPlan plan_step(const RunConfig& config, const PlanCosts& of) {
  const PlannedWorld ranks(config);
  StepPlan plan;
  plan.world_size = ranks.mesh().world_size();
  plan.schedule = c10::str(config.pipeline.schedule, ", ", accumulation(config),
                           " micro-batches of ", config.batch.micro);
  const auto costs = costs_of(config, of, ranks, plan);
  const auto simulation = program::simulate(ranks.world(), costs);
  plan.step = simulation.step;
  plan.bubble = simulation.bubble();
  const auto memory = memory_plans(config);
  for (int64_t stage = 0; stage < ranks.stages(); ++stage) {
    const int64_t rank = ranks.first_rank_of(stage);
    const auto& facts = ranks.facts_of(rank);
    PlannedStage& each = plan.stages.emplace_back();
    each.rank = rank;
    each.num_ranks = plan.world_size / ranks.stages();
    each.program = ranks.world().programs.at(rank)->program;
    each.units = facts.units;
    each.times = simulation.of(rank);
    each.memory = program::memory_of(each.program, facts.units, facts.facts);
    each.state_bytes = memory.at(stage).states;
    each.peak_bytes = each.state_bytes + each.memory.peak();
  }
  return plan;
}

report::Panel panel_of(const StepPlan& plan) {
  report::Panel panel;
  panel.title =
      c10::str(plan.schedule, ": predicted ", amount(plan.step, plan.unit),
               ", bubble ", percent(plan.bubble));
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const PlannedStage& stage = plan.stages[i];
    report::Row row{.label = label_of(plan, i), .boxes = {}, .note = {}};
    for (size_t at = 0; at < stage.program.size(); ++at) {
      if (waits_for_stages(stage.program[at], stage.units)) continue;
      add_box(row.boxes, stage.program[at], stage.times.at[at],
              kClosely * plan.step);
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

namespace {

using program::schedules::Schedule;
using program::schedules::Shape;

double bubble_of(const Schedule& schedule, const Shape& shape) {
  return program::schedules::simulate(schedule, shape, program::Times{},
                                      /*message=*/0, /*lowered=*/false)
      .bubble();
}

bool is_enough(const Schedule& schedule, Shape shape, int64_t microbatches,
               double half) {
  shape.num_microbatches = microbatches;
  return program::schedules::takes(schedule, shape) &&
         bubble_of(schedule, shape) <= half + 1e-9;
}

// So many micro-batches that they halve the bubble, as keys: of the same batch
// where it can be cut so. A bubble lasts as long however many there are.
std::string halving_batch(const RunConfig& config, const Schedule& schedule,
                          const Shape& shape, double bubble) {
  const int64_t now = shape.num_microbatches;
  const int64_t replicas = data_parallel_degree(config);
  const int64_t samples = config.batch.global / replicas;
  const double ideal = static_cast<double>(now) / (1 - bubble);
  const auto least = static_cast<int64_t>(std::ceil(now + ideal - 1e-9));
  for (int64_t m = least; m <= samples; ++m) {
    if (samples % m == 0 && is_enough(schedule, shape, m, bubble / 2)) {
      return c10::str(m, " micro-batches (batch.micro ", samples / m, ")");
    }
  }
  for (int64_t m = least; m <= least + 2 * shape.stages; ++m) {
    if (is_enough(schedule, shape, m, bubble / 2)) {
      return c10::str(m, " micro-batches (batch.global ",
                      m * config.batch.micro * replicas, ")");
    }
  }
  return "";
}

// Another schedule with half of the bubble, as keys; "": none.
std::string halving_schedule(const RunConfig& config, Shape shape,
                             double half) {
  for (const char* name : {"interleaved", "zb_h1", "zb_v"}) {
    const Schedule& other = program::schedules::named(name);
    shape.chunks = other.chunked ? 2 : 1;
    if (shape.stages * shape.chunks > config.model.layers ||
        !program::schedules::takes(other, shape) ||
        bubble_of(other, shape) > half + 1e-9) {
      continue;
    }
    return c10::str("pipeline.schedule ", name,
                    other.chunked ? " with pipeline.chunks 2" : "");
  }
  return "";
}

}  // namespace

std::string bubble_hint(const RunConfig& config) {
  const int64_t stages = config.mesh.pp, microbatches = accumulation(config);
  if (config.mesh.star() || stages < 2 || microbatches >= 2 * stages) return "";
  const Schedule& schedule =
      program::schedules::named(config.pipeline.schedule);
  const Shape shape{.stages = stages,
                    .chunks = config.pipeline.num_chunks(),
                    .num_microbatches = microbatches,
                    .reversed = config.pipeline.order == "reverse"};
  const double bubble = bubble_of(schedule, shape);
  if (bubble < 0.01) return "";
  std::vector<std::string> ways;
  const auto batch = halving_batch(config, schedule, shape, bubble);
  if (!batch.empty()) ways.push_back(batch);
  const auto other = halving_schedule(config, shape, bubble / 2);
  if (!other.empty()) ways.push_back(other);
  std::string hint = c10::str(
      "pipeline: ", microbatches, " micro-batches for ", stages,
      " stages are fewer than two a stage: ", percent(bubble), " of a step of ",
      schedule.name, " is bubble, in which stages wait for each other.");
  if (!ways.empty()) {
    hint += c10::str(" ", c10::Join(" or ", ways), " would halve that.");
  }
  return hint;
}

}  // namespace tessera::engine
