#include "tessera/engine/step_plan.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/engine/step_programs.h"
#include "tessera/models/model.h"
#include "tessera/nn/parameter.h"
#include "tessera/parallel/compose.h"

namespace tessera::engine {

using mesh::Axis;
using program::Op;
using program::Purpose;

namespace {

// The first ranks of tp have what is left over of a dim.
bool cuts_evenly(models::Model& model, const mesh::DeviceMesh& mesh) {
  const mesh::Coord first = mesh.coord_of(0);
  mesh::Coord last = first;
  last[Axis::kTp] = mesh.degree(Axis::kTp) - 1;
  last = mesh.coord_of(mesh.rank_at(last));
  return std::ranges::all_of(nn::parameters_of(model), [&](const auto& each) {
    const mesh::Layout& layout = each.spec->layout;
    return layout.local_box(mesh, first).size ==
           layout.local_box(mesh, last).size;
  });
}

// The ranks of a mesh as a world of programs. Ranks of a stage run one program;
// what it moves depends on their kind, and how long it takes on their speed.
class PlannedWorld {
 public:
  explicit PlannedWorld(const RunConfig& config)
      : config_(config),
        mesh_(mesh_of(config, implied_world_size(config))),
        lanes_(mesh_) {
    const RunFacts facts(config, mesh_);
    is_even_ = !reads_for_others(config) && cuts_evenly(facts.model(), mesh_);
    units_ = parallel::model_units(facts.model(), mesh_, config);
    const RunConfig resolved = config.with(units_.config);
    const RunFacts facts_of_transfers(resolved, mesh_);
    for (int64_t stage = 0; stage < stages(); ++stage) {
      programs_by_stage_.push_back(lowered_program(
          config, mesh_, units_, stage, Purpose::kTraining, passes_chosen()));
    }
    for (int64_t rank = 0; rank < mesh_.world_size(); ++rank) {
      add(rank, facts, facts_of_transfers);
    }
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
  int64_t fullest_rank_of(int64_t stage) const {
    mesh::Coord coord = mesh_.coord_of(0);
    coord[Axis::kPp] = stage;
    return rank_with_most_samples(config_, mesh_, coord);
  }
  program::Units units_of(int64_t rank) const {
    return units_.units_of(mesh_, rank);
  }
  const program::RankFacts& facts_of(int64_t rank) const {
    return facts_.at(key_of(rank));
  }

 private:
  using Key = std::pair<RankKind, double>;  // and speed
  Key key_of(int64_t rank) const {
    RankKind kind = kind_of(config_, mesh_, mesh_.coord_of(rank));
    if (is_even_) kind.tp = 0;
    return {kind, config_.mesh.speed_of(rank)};
  }

  void add(int64_t rank, const RunFacts& facts,
           const RunFacts& facts_of_transfers) {
    const Key key = key_of(rank);
    const auto [found, is_new] = programs_.try_emplace(key);
    world_.programs.push_back(&found->second);
    if (!is_new) return;
    const mesh::Coord coord = mesh_.coord_of(rank);
    found->second = transfers_of(config_, mesh_, units_, rank, lanes_,
                                 facts_of_transfers.of(coord));
    found->second.program = programs_by_stage_.at(key.first.stage);
    facts_[key] = {facts.of(coord), units_.units_of(mesh_, rank)};
  }

  const RunConfig& config_;
  const mesh::DeviceMesh mesh_;
  bool is_even_ = false;  // ranks of tp have as much, and do the same
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
    const auto& of = ranks.facts_of(ranks.fullest_rank_of(stage));
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
    units.push_back(ranks.units_of(ranks.fullest_rank_of(stage)));
  }
  const std::vector<program::Times> stages(ranks.stages(), times);
  return program::work_of_stages(
      stages, std::move(units), passes,
      [&ranks](int64_t rank) { return ranks.stage_of(rank); });
}

// Of ranks that are not equally fast.
program::Work by_speed(program::Work work, const mesh::MeshConfig& mesh) {
  return [work = std::move(work), &mesh](int64_t rank,
                                         const program::Instruction& each) {
    return work(rank, each) / mesh.speed_of(rank);
  };
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

// Of what lies along several axes the slowest. Lanes are called by their axes:
// "dp_shard+cp (4)", "pp 0 3 (2)", "dp_shard tp".
program::Link link_of(std::string lane,
                      const std::map<std::string, program::Link>& links) {
  std::ranges::replace(lane, ' ', '+');
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
  const bool seen = !of.stages && !of.device && of.traced != nullptr;
  if (config.mesh.uneven() && !seen) {
    costs.work = by_speed(std::move(costs.work), config.mesh);
    plan.costs += ", over mesh.speeds";
  }
  return costs;
}

// Of steps that go on, the last of those that neither fill nor empty the
// pipeline.
void take_one_step(StepPlan& plan) {
  plan.steps = std::ssize(plan.stages.front().times.step_ends);
  double bubble = 0, ranks = 0;
  plan.step = 0;
  for (PlannedStage& stage : plan.stages) {
    auto& times = stage.times;
    const auto& from = times.step_ends.at(plan.steps - 3);
    const auto& to = times.step_ends.at(plan.steps - 2);
    times.work = to.work - from.work;
    times.bubble = to.bubble - from.bubble;
    times.exposed = to.exposed - from.exposed;
    times.files = to.files - from.files;
    plan.step = std::max(plan.step, to.time - from.time);
    bubble += times.bubble * static_cast<double>(stage.num_ranks);
    ranks += static_cast<double>(stage.num_ranks);
  }
  plan.bubble = plan.step > 0 ? bubble / (ranks * plan.step) : 0;
}

// What one step runs of a program: of several that go on, as above.
program::Program step_of(const program::Program& program,
                         const RunConfig& config) {
  if (!config.pipeline.delayed()) return program;
  auto steps = program::steps_of(program, accumulation(config));
  return std::move(steps.at(steps.size() - 2));
}

StepPlan planned(const RunConfig& config, const PlanCosts& of,
                 const PlannedWorld& ranks,
                 const std::vector<MemoryPlan>& memory) {
  StepPlan plan;
  plan.world_size = ranks.mesh().world_size();
  plan.schedule = c10::str(config.pipeline.schedule, ", ", accumulation(config),
                           " micro-batches of ", rows_text(config));
  const auto costs = costs_of(config, of, ranks, plan);
  const auto simulation = program::simulate(ranks.world(), costs);
  plan.step = simulation.step;
  plan.bubble = simulation.bubble();
  for (int64_t stage = 0; stage < ranks.stages(); ++stage) {
    const int64_t rank = ranks.fullest_rank_of(stage);
    const auto& facts = ranks.facts_of(rank);
    PlannedStage& each = plan.stages.emplace_back();
    each.rank = rank;
    each.num_ranks = plan.world_size / ranks.stages();
    each.program = ranks.world().programs.at(rank)->program;
    each.units = facts.units;
    each.times = simulation.of(rank);
    each.memory = program::memory_of(each.program, facts.units, facts.facts);
    each.state_bytes = memory.at(stage).states;
    each.peak_bytes =
        each.state_bytes + std::max(memory.at(stage).work, each.memory.peak());
    each.moved_bytes =
        program::moved_bytes(ranks.world(), rank, step_of(each.program, config),
                             costs.message_element_bytes);
  }
  if (config.pipeline.delayed()) take_one_step(plan);
  return plan;
}

}  // namespace

StepPlan plan_step(const RunConfig& config, const PlanCosts& of) {
  return plan_steps(config, {of}, memory_plans(config)).front();
}

std::vector<StepPlan> plan_steps(const RunConfig& config,
                                 const std::vector<PlanCosts>& costs,
                                 const std::vector<MemoryPlan>& memory) {
  const PlannedWorld ranks(config);
  std::vector<StepPlan> plans;
  for (const PlanCosts& each : costs) {
    plans.push_back(planned(config, each, ranks, memory));
  }
  return plans;
}

}  // namespace tessera::engine
