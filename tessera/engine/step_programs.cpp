#include "tessera/engine/step_programs.h"

#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/batch_share.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/pipeline/pipeline_config.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/program/world.h"

namespace tessera::engine {

using mesh::Axis;
namespace passes = program::passes;
using program::Purpose;
using program::RankProgram;

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
std::vector<std::string> named_in(const char* variable, passes::Use use,
                                  const char* choice) {
  const char* const value = std::getenv(variable);
  std::vector<std::string> names;
  std::istringstream list(value ? value : "");
  for (std::string name; std::getline(list, name, ',');) {
    std::string with_choice;
    bool known = false;
    for (const auto& pass : passes::all()) {
      if (pass.use != use) continue;
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

using Programs = std::map<Purpose, std::vector<program::Program>>;  // by stage

// Ranks of a stage run one program; what it moves depends on their kind.
void prove(const RunConfig& config, const mesh::DeviceMesh& mesh,
           const parallel::ModelUnits& model, const Programs& by_stage) {
  parallel::Lanes lanes(mesh);
  std::map<RankKind, RankProgram> programs;
  program::World world;
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    const auto [found, is_new] =
        programs.try_emplace(kind_of(config, mesh, mesh.coord_of(rank)));
    world.programs.push_back(&found->second);
    if (is_new) found->second = transfers_of(config, mesh, model, rank, lanes);
  }
  world.pipeline = lanes.along({Axis::kPp});
  world.lanes = lanes.names();
  world.members = [&](int64_t rank, int64_t lane) {
    return lanes.members(rank, lane);
  };
  for (const auto& [purpose, programs_of_it] : by_stage) {
    for (auto& [kind, program] : programs) {
      program.program = programs_of_it.at(kind.stage);
    }
    program::check(world);
  }
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
                                 const passes::Choice& choice) {
  const bool trains = purpose == Purpose::kTraining;
  TS_CHECK_CONFIG(!config.mesh.star() || choice.with.empty(),
                  "TESSERA_WITH_PASSES: devices of mesh.data_parallel dp run "
                  "whole models; they have no such passes.");
  program::Units units;
  if (config.mesh.star()) {  // whole chunks on every device
    units.alone = true;
    units.devices = trains ? data_parallel_degree(config) : 1;
  } else {
    mesh::Coord coord = mesh.coord_of(0);
    coord[Axis::kPp] = stage;
    units = model.units_of(mesh, mesh.rank_at(coord));
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
      .reversed = pipeline.order == "reverse"};
  const auto& schedule = program::schedules::named(pipeline.schedule);
  const program::schedules::Tail tail{
      .clip = config.optimizer.scales_gradients(), .alone = units.alone};
  return passes::lower(
      trains ? program::schedules::step(schedule, shape, stage, tail)
             : program::schedules::evaluation(shape, stage, schedule.placement),
      units, purpose, choice);
}

passes::Choice passes_chosen() {
  return {.without = named_in("TESSERA_WITHOUT_PASSES",
                              passes::Use::kUnlessLeftOut, "left out"),
          .with = named_in("TESSERA_WITH_PASSES", passes::Use::kIfAskedFor,
                           "asked for")};
}

program::RankProgram transfers_of(const RunConfig& config,
                                  const mesh::DeviceMesh& mesh,
                                  const parallel::ModelUnits& model,
                                  int64_t rank, parallel::Lanes& lanes) {
  const mesh::Coord coord = mesh.coord_of(rank);
  RankProgram program;
  program.units = model.transfers_of(mesh, rank, lanes);
  add_inner(facts_of(config, mesh, coord), lanes, program);
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
  program.message_elements = samples *
                             parallel::local_length(config.data.seq_len, mesh) *
                             config.model.hidden;
  return program;
}

std::map<Purpose, program::Program> proved_programs(
    const RunConfig& config, const mesh::DeviceMesh& mesh,
    const parallel::ModelUnits& model, int64_t rank,
    const std::vector<Purpose>& purposes, const passes::Choice& choice) {
  Programs by_stage;
  for (Purpose purpose : purposes) {
    for (int64_t stage = 0; stage < config.mesh.pp; ++stage) {
      by_stage[purpose].push_back(
          lowered_program(config, mesh, model, stage, purpose, choice));
    }
  }
  if (!config.mesh.star() && mesh.world_size() > 1) {
    prove(config, mesh, model, by_stage);
  }
  std::map<Purpose, program::Program> mine;
  for (auto& [purpose, programs] : by_stage) {
    mine[purpose] = std::move(programs.at(mesh.coord_of(rank)[Axis::kPp]));
  }
  return mine;
}

}  // namespace tessera::engine
