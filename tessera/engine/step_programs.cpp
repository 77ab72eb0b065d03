#include "tessera/engine/step_programs.h"

#include <map>
#include <utility>

#include "tessera/program/passes/pass.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/program/world.h"

namespace tessera::engine {

using mesh::Axis;
using program::Kind;
using program::RankProgram;

namespace {

// Data parallelism on threads: whole chunks on every device.
bool is_star(const RunConfig& config) {
  return config.mesh.data_parallel == "dp";
}

}  // namespace

StepPrograms::StepPrograms(const RunConfig& config,
                           const parallel::Composed& composed,
                           const std::vector<std::string>& without)
    : config_(config), composed_(composed) {
  for (Kind kind : {Kind::kTraining, Kind::kEvaluation}) {
    for (int64_t stage = 0; stage < config.mesh.pp; ++stage) {
      programs_[kind].push_back(lowered(stage, kind, without));
    }
    prove(kind);
  }
}

const program::Program& StepPrograms::of(int64_t rank, Kind kind) const {
  return programs_.at(kind).at(composed_.mesh.coord_of(rank)[Axis::kPp]);
}

program::Program StepPrograms::lowered(
    int64_t stage, Kind kind, const std::vector<std::string>& without) const {
  const bool trains = kind == Kind::kTraining;
  program::Units units;
  if (is_star(config_)) {
    units.alone = true;
    units.devices = trains ? data_parallel_degree(config_) : 1;
  } else {
    mesh::Coord coord = composed_.mesh.coord_of(0);
    coord[Axis::kPp] = stage;
    units =
        composed_.model.units_of(composed_.mesh, composed_.mesh.rank_at(coord));
  }
  auto shape = shape_of(config_);
  if (!trains) shape.num_microbatches = 1;
  const auto& schedule = program::schedules::named(config_.pipeline.schedule);
  const program::schedules::Tail tail{.clip = config_.optimizer.clip_norm > 0,
                                      .alone = units.alone};
  return program::passes::lower(
      trains ? program::schedules::step(schedule, shape, stage, tail)
             : program::schedules::evaluation(shape, stage),
      units, kind, without);
}

// Ranks of a stage run one program; what it moves depends on their place along
// tp alone.
void StepPrograms::prove(Kind kind) const {
  if (is_star(config_) || composed_.mesh.world_size() == 1) return;
  const mesh::DeviceMesh& mesh = composed_.mesh;
  parallel::Lanes lanes(mesh);
  std::map<std::pair<int64_t, int64_t>, RankProgram> programs;
  program::World world;
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    const mesh::Coord coord = mesh.coord_of(rank);
    const auto [found, is_new] =
        programs.try_emplace({coord[Axis::kPp], coord[Axis::kTp]});
    world.programs.push_back(&found->second);
    if (!is_new) continue;
    RankProgram& program = found->second;
    program.program = of(rank, kind);
    program.units = composed_.model.transfers_of(mesh, rank, lanes);
    program.norm = {{"all_reduce", lanes.world(), at::kDouble, 1}};
    program.stage = coord[Axis::kPp];
    program.stages = mesh.degree(Axis::kPp);
    program.message_elements = config_.batch.micro * config_.data.seq_len /
                               config_.mesh.cp * config_.model.hidden;
  }
  world.pipeline = lanes.along(Axis::kPp);
  world.lanes = lanes.names();
  world.members = [&](int64_t rank, int64_t lane) {
    return lanes.members(rank, lane);
  };
  program::check(world);
}

}  // namespace tessera::engine
