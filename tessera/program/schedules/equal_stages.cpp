#include "tessera/program/schedules/equal_stages.h"

#include <numeric>

#include "tessera/program/passes/pass.h"

namespace tessera::program::schedules {

std::vector<RankProgram> programs_of(const Schedule& schedule,
                                     const Shape& shape,
                                     bool lowered /* = true */,
                                     int64_t count /* = 1 */) {
  std::vector<RankProgram> programs;
  for (int64_t stage = 0; stage < shape.stages; ++stage) {
    RankProgram& each = programs.emplace_back();
    each.program = steps(schedule, shape, stage, count);
    Units units;
    units.versions = versions_of(schedule, shape.stages, stage);
    if (lowered) each.program = passes::lower(each.program, units);
    each.norm = {{"all_reduce", 1, at::kDouble, 1}};
    each.between_steps = {{"all_gather", 1, at::kDouble, 1}};
    each.stage = stage;
    each.stages = shape.stages;
    each.placement = schedule.placement;
  }
  return programs;
}

Simulation simulate(const std::vector<RankProgram>& programs,
                    const Costs& costs) {
  World world{.programs = {},
              .lanes = {"pp", "world"},
              .pipeline = 0,
              .members = [size = programs.size()](int64_t, int64_t) {
                std::vector<int64_t> ranks(size);
                std::iota(ranks.begin(), ranks.end(), 0);
                return ranks;
              }};
  for (const auto& each : programs) world.programs.push_back(&each);
  return program::simulate(world, costs);
}

Simulation simulate(const Schedule& schedule, const Shape& shape,
                    const Times& times, double message /* = 0 */,
                    bool lowered /* = true */, int64_t count /* = 1 */) {
  const std::vector<Times> stages(shape.stages, times);
  const auto itself = [](int64_t rank) { return rank; };
  const int64_t passes = pipeline_of(schedule, shape).num_runs() / shape.stages;
  return simulate(programs_of(schedule, shape, lowered, count),
                  {.work = work_of_stages(stages, {}, passes, itself),
                   .links = {{.latency = message}}});
}

}  // namespace tessera::program::schedules
