#include "tessera/engine/step_programs.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/batch_share.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/nn/waiting_rows.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/pipeline/pipeline_config.h"
#include "tessera/program/schedules/file.h"
#include "tessera/program/world.h"

namespace tessera::engine {

using mesh::Axis;
namespace passes = program::passes;
using program::Purpose;
using program::RankProgram;
using program::schedules::kStepsTogether;

namespace {

// What units do together with others inside of a forward or a backward.
std::vector<program::Transfer> transfers_of(
    const std::vector<program::InnerCollective>& collectives,
    parallel::Lanes& lanes) {
  std::vector<program::Transfer> transfers;
  for (const auto& each : collectives) {
    transfers.push_back(
        {each.verb, lanes.along(each.axes), at::kByte, each.bytes});
  }
  return transfers;
}

void add_inner(const program::Facts& facts, parallel::Lanes& lanes,
               RankProgram& program) {
  for (size_t unit = 0; unit < program.units.size(); ++unit) {
    const program::UnitFacts& of = facts.units.at(unit);
    program.units[unit].forward = transfers_of(of.forward_collectives, lanes);
    program.units[unit].again = transfers_of(of.again.collectives, lanes);
    program.units[unit].backward = transfers_of(of.backward_collectives, lanes);
  }
  program.loss = transfers_of(facts.loss.forward_collectives, lanes);
}

// The passes that an environment variable names, all of them with this choice.
std::vector<std::string> named_in(const char* variable,
                                  const std::vector<passes::Use>& uses,
                                  const char* choice) {
  const char* const value = std::getenv(variable);
  std::vector<std::string> names;
  std::istringstream list(value ? value : "");
  for (std::string name; std::getline(list, name, ',');) {
    std::string with_choice;
    bool known = false;
    for (const auto& pass : passes::all()) {
      if (std::ranges::count(uses, pass.use) == 0) continue;
      known |= name == pass.name;
      with_choice += std::string(with_choice.empty() ? "" : ", ") + pass.name;
    }
    TS_CHECK_CONFIG(known, variable, " names \"", name,
                    "\", which is no pass that can be ", choice, ": ",
                    with_choice, ".");
    names.push_back(name);
  }
  return names;
}

using ByStage = std::vector<program::Program>;

// Ranks of a stage run one program; what it moves depends on their kind.
void prove(const RunConfig& config, const mesh::DeviceMesh& mesh,
           const parallel::ModelUnits& model, const std::vector<ByStage>& all) {
  const RunConfig resolved = config.with(model.config);
  const RunFacts facts(resolved, mesh);
  parallel::Lanes lanes(mesh);
  std::map<RankKind, RankProgram> programs;
  program::World world;
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    const auto [found, is_new] =
        programs.try_emplace(kind_of(config, mesh, mesh.coord_of(rank)));
    world.programs.push_back(&found->second);
    if (!is_new) continue;
    found->second = transfers_of(config, mesh, model, rank, lanes,
                                 facts.of(mesh.coord_of(rank)));
    // Whoever runs them waits for all ranks there, to tell of the step.
    found->second.between_steps = {
        {"all_gather", lanes.world(), at::kDouble, 1}};
  }
  world.pipeline = lanes.along({Axis::kPp});
  world.lanes = lanes.names();
  world.members = [&](int64_t rank, int64_t lane) {
    return lanes.members(rank, lane);
  };
  for (const ByStage& by_stage : all) {
    for (auto& [kind, program] : programs) {
      program.program = by_stage.at(kind.stage);
    }
    program::check(world);
  }
}

// Whether rows of micro-batches wait for each other, as the first data-parallel
// rank of a stage has them.
bool rows_wait(const RunConfig& config, const mesh::DeviceMesh& mesh,
               const parallel::ModelUnits& model, const mesh::Coord& coord) {
  const int64_t rows = SampleShares(config).rows_of(mesh.data_rank_of(coord)) *
                       parallel::local_length(config.data.seq_len, mesh);
  constexpr int64_t kLarge = int64_t{1} << 20;  // of a weight that limits none
  if (nn::batches_together(rows, kLarge, kLarge, accumulation(config),
                           config.precision.compute_dtype()) == 1) {
    return false;
  }
  const auto facts = facts_of(config.with(model.config), mesh, coord);
  return std::ranges::any_of(facts.units, &program::UnitFacts::waiting_bytes);
}

// `together`: kStepsTogether.
StepPrograms cut(program::Program alone, const program::Program& together,
                 int64_t num_microbatches) {
  const auto steps = program::steps_of(together, num_microbatches);
  TORCH_INTERNAL_ASSERT(steps.size() == kStepsTogether && steps[1] == steps[2],
                        "program: steps that go on are not alike");
  return {std::move(alone), steps.front(), steps[1], steps.back()};
}

}  // namespace

RankKind kind_of(const RunConfig& config, const mesh::DeviceMesh& mesh,
                 const mesh::Coord& coord) {
  return {.stage = coord[Axis::kPp],
          .tp = coord[Axis::kTp],
          .data = config.batch.rows.empty() ? 0 : mesh.data_rank_of(coord)};
}

program::Program lowered_program(const RunConfig& config,
                                 const mesh::DeviceMesh& mesh,
                                 const parallel::ModelUnits& model,
                                 int64_t stage, Purpose purpose,
                                 const passes::Choice& choice, int64_t steps) {
  const bool trains = purpose == Purpose::kTraining;
  check_passes(config, choice);
  mesh::Coord coord = mesh.coord_of(0);
  program::Units units;
  if (config.mesh.star()) {  // whole chunks on every device
    units.alone = true;
    units.devices = trains ? data_parallel_degree(config) : 1;
  } else {
    coord[Axis::kPp] = stage;
    units = model.units_of(mesh, mesh.rank_at(coord), purpose);
  }
  units.documents = config.data.documents_apart();
  units.shares_batch = trains && reads_for_others(config);
  // Devices have no stages: whatever the schedule, they accumulate.
  const auto pipeline = config.mesh.star()
                            ? parallel::pipeline::PipelineConfig{}
                            : config.pipeline;
  const program::schedules::Shape shape{
      .stages = mesh.degree(Axis::kPp),
      .chunks = pipeline.num_chunks(),
      .num_microbatches = trains ? accumulation(config) : 1,
      .documents = units.documents,
      .ahead = trains && config.model.mtp.layers > 0,
      .reversed = pipeline.order == "reverse"};
  const auto& schedule = program::schedules::named(pipeline.schedule);
  const program::schedules::Tail tail{
      .clip = config.optimizer.scales_gradients(), .alone = units.alone};
  if (trains) {
    // A backward that multiplies what waited is long: the stage before goes on
    // meanwhile (bench/results/waiting_rows_2core_2026-11-26.md). A schedule of
    // the user's is run as it stands.
    passes::Choice chosen = choice;
    if (shape.stages > 1 &&
        !program::schedules::names_file(pipeline.schedule) &&
        rows_wait(config, mesh, model, coord)) {
      chosen.with.emplace_back("split_backward");
    }
    return passes::lower(
        program::schedules::steps(schedule, shape, stage,
                                  schedule.delayed ? steps : 1, tail),
        units, purpose, chosen);
  }
  auto evaluation =
      program::schedules::evaluation(shape, stage, schedule.placement);
  for (auto& each : evaluation) each.version = units.versions.parameters - 1;
  return passes::lower(std::move(evaluation), units, purpose, choice);
}

const program::Program& StepPrograms::of(bool is_begun,
                                         bool begins_next) const {
  if (is_begun) return begins_next ? steady : last;
  return begins_next ? first : alone;
}

passes::Choice passes_chosen() {
  return {.without =
              named_in("TESSERA_WITHOUT_PASSES",
                       {passes::Use::kUnlessLeftOut, passes::Use::kIfAskedFor},
                       "left out"),
          .with = named_in("TESSERA_WITH_PASSES", {passes::Use::kIfAskedFor},
                           "asked for")};
}

bool can_be_without(const RunConfig& config, const passes::Pass& pass) {
  // Messages of steps without a flush cross those of a tied embedding's sum.
  const bool cross =
      config.pipeline.delayed() && std::string_view(pass.name) == "messages";
  return pass.use != passes::Use::kAlways && !cross;
}

void check_passes(const RunConfig& config, const passes::Choice& choice) {
  TS_CHECK_CONFIG(!config.mesh.star() || choice.with.empty(),
                  "TESSERA_WITH_PASSES: devices of mesh.data_parallel dp run "
                  "whole models; they have no such passes.");
  for (const auto& pass : passes::all()) {
    const bool left_out = std::ranges::count(choice.without, pass.name) > 0;
    TS_CHECK_CONFIG(!left_out || can_be_without(config, pass),
                    "TESSERA_WITHOUT_PASSES names ", pass.name,
                    ", which steps of pipeline.schedule ",
                    config.pipeline.schedule, " need.");
  }
}

program::RankProgram transfers_of(const RunConfig& config,
                                  const mesh::DeviceMesh& mesh,
                                  const parallel::ModelUnits& model,
                                  int64_t rank, parallel::Lanes& lanes,
                                  const program::Facts& facts) {
  const mesh::Coord coord = mesh.coord_of(rank);
  RankProgram program;
  program.units = model.transfers_of(mesh, rank, lanes);
  add_inner(facts, lanes, program);
  program.norm = {{"all_reduce", lanes.world(), at::kDouble, 1}};
  const int64_t samples =
      SampleShares(config).rows_of(mesh.data_rank_of(coord));
  if (reads_for_others(config)) {
    program.batch = {{"broadcast", lanes.along(axes_of_readers()), at::kLong,
                      extent_of_step(config, samples).elements()}};
  }
  program.stage = coord[Axis::kPp];
  program.stages = mesh.degree(Axis::kPp);
  program.placement = config.pipeline.placement();
  const int64_t shards =
      config.tensor.sequence_parallel ? mesh.degree(Axis::kTp) : 1;
  program.message_elements =
      samples * (parallel::local_length(config.data.seq_len, mesh) / shards) *
      config.model.hidden;
  return program;
}

RankPrograms proved_programs(const RunConfig& config,
                             const mesh::DeviceMesh& mesh,
                             const parallel::ModelUnits& model, int64_t rank,
                             const std::vector<Purpose>& purposes,
                             const passes::Choice& choice) {
  std::vector<ByStage> all;
  const auto add = [&](Purpose purpose, int64_t steps) {
    ByStage& by_stage = all.emplace_back();
    for (int64_t stage = 0; stage < config.mesh.pp; ++stage) {
      by_stage.push_back(
          lowered_program(config, mesh, model, stage, purpose, choice, steps));
    }
  };
  const bool goes_on = config.pipeline.delayed() && !config.mesh.star();
  for (Purpose purpose : purposes) {
    add(purpose, 1);
    if (goes_on && purpose == Purpose::kTraining) add(purpose, kStepsTogether);
  }
  if (!config.mesh.star() && mesh.world_size() > 1) {
    prove(config, mesh, model, all);
  }
  RankPrograms mine;
  const int64_t stage = mesh.coord_of(rank)[Axis::kPp];
  auto next = all.begin();
  for (Purpose purpose : purposes) {
    program::Program& program = (next++)->at(stage);
    if (purpose == Purpose::kEvaluation) {
      mine.evaluation = std::move(program);
    } else if (goes_on) {
      mine.step =
          cut(std::move(program), (next++)->at(stage), accumulation(config));
    } else {
      mine.step.alone = std::move(program);
    }
  }
  return mine;
}

}  // namespace tessera::engine
