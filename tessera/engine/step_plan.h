// A step before it is run: the programs of all ranks of a mesh, simulated.
//
// Time:   of what its costs are in: units, or seconds. See PlanCosts.
// Memory: as engine/memory_plan.h has it.
// No rank, no tensor; any world size: ranks of a stage are followed as one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/memory_plan.h"
#include "tessera/engine/run_config.h"
#include "tessera/engine/traced_steps.h"
#include "tessera/program/simulator.h"

namespace tessera::engine {

// Where none is given: operations (program/facts.h), in units of what a stage's
// forward of a micro-batch takes on average, over links that take no time.
// A rank takes what is said here over its mesh.speeds, but where it was seen.
struct PlanCosts {
  // Every stage alike, in any unit; and a message.
  std::optional<program::Times> stages;
  double message = 0;
  // In seconds: a device's rates, or means of what ranks were seen to take.
  std::optional<program::Device> device;
  const TracedRanks* traced = nullptr;
  // By axis; "" is that of all others.
  std::map<std::string, program::Link> links;
};

// A stage of the pipeline, by the one of its ranks that has most samples.
struct PlannedStage {
  int64_t rank = 0;  // the lowest
  int64_t num_ranks = 0;
  program::Program program;
  program::Units units;
  program::RankTimes times;
  program::Memory memory;  // beyond the states
  int64_t state_bytes = 0;
  // With the states, of whichever of its ranks holds the most.
  int64_t peak_bytes = 0;
  // In one step: see program::moved_bytes().
  int64_t moved_bytes = 0;
};

struct StepPlan {
  std::string schedule;  // with its micro-batches, in words
  std::string unit;      // of time: "s", or in words
  std::string costs;     // where times are from, in words
  double step = 0;
  double bubble = 0;  // the mean share of the step
  // That stages' programs have; of several, which go on without a flush, one in
  // the middle is the step that all numbers are of.
  int64_t steps = 1;
  int64_t world_size = 0;
  std::vector<PlannedStage> stages;
};

// REQUIRES: a completed configuration of ranks (not of mesh.data_parallel dp).
// TS_CHECK_CONFIG where a trace is of another mesh, or of other programs.
StepPlan plan_step(const RunConfig& config, const PlanCosts& costs);
// By each of these costs; ranks and programs are made once. `memory`: the
// configuration's.
std::vector<StepPlan> plan_steps(const RunConfig& config,
                                 const std::vector<PlanCosts>& costs,
                                 const std::vector<MemoryPlan>& memory);

}  // namespace tessera::engine
