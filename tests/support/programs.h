// What the tests of this room share: units, lowered programs, small worlds.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/program/passes/pass.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/program/world.h"

namespace tessera::program {

// One chunk of n units; `tied`: the last reads the first one's parameters too.
inline Units units_of(int64_t n, int64_t zero_stage, bool tied = false,
                      bool reshard = true) {
  Units units;
  units.reshard_after_forward = reshard;
  units.chunks.emplace_back(n);
  std::iota(units.chunks[0].begin(), units.chunks[0].end(), 0);
  for (int64_t unit = 0; unit < n; ++unit) {
    units.all.push_back(
        {.reads = {unit}, .zero_stage = zero_stage, .bytes = 100});
  }
  if (tied) units.all.back().reads.push_back(0);
  return units;
}

inline Program accumulation(int64_t k, bool clip = true) {
  return schedules::step(schedules::named("1f1b"), {.num_microbatches = k}, 0,
                         {.clip = clip});
}

inline Program lowered(int64_t k, const Units& units,
                       const std::vector<std::string>& without = {}) {
  return passes::lower(accumulation(k), units, Purpose::kTraining,
                       {.without = without});
}

// The stages of a pipeline, of `units_each` units a chunk, one rank each.
struct Stages {
  std::vector<std::unique_ptr<RankProgram>> programs;
  World world;
};

// `steps`: of a schedule that goes on from one to the next.
inline Stages stages_of(const std::string& schedule,
                        const schedules::Shape& shape, int64_t units_each = 1,
                        const passes::Choice& choice = {}, int64_t steps = 1) {
  Stages all;
  const schedules::Schedule of = schedules::named(schedule);
  const Pipeline pipeline = schedules::pipeline_of(of, shape);
  const int64_t runs = pipeline.num_runs();
  for (int64_t stage = 0; stage < shape.stages; ++stage) {
    Units units;
    units.versions = schedules::versions_of(of, shape.stages, stage);
    for (int64_t unit = 0; unit < runs * units_each; ++unit) {
      units.all.push_back({.reads = {unit}, .reduced = false});
    }
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      std::vector<int64_t> mine(units_each);
      std::iota(mine.begin(), mine.end(),
                pipeline.run_of({stage, chunk}) * units_each);
      units.chunks.push_back(mine);
    }
    auto program = std::make_unique<RankProgram>();
    program->program = passes::lower(
        schedules::steps(of, shape, stage, of.delayed ? steps : 1), units,
        Purpose::kTraining, choice);
    // Where ranks tell each other of the step.
    program->between_steps = {{"all_gather", 0, at::kDouble, 1}};
    program->stage = stage;
    program->stages = shape.stages;
    program->placement = of.placement;
    all.world.programs.push_back(program.get());
    all.programs.push_back(std::move(program));
  }
  all.world.lanes = {"pp"};
  all.world.pipeline = 0;
  const int64_t p = shape.stages;
  all.world.members = [p](int64_t, int64_t) {
    std::vector<int64_t> ranks(p);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  };
  return all;
}

}  // namespace tessera::program
