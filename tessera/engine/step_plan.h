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

#include "tessera/engine/run_config.h"
#include "tessera/monitor/report/drawing.h"
#include "tessera/monitor/report/run_trace.h"
#include "tessera/program/simulator.h"

namespace tessera::engine {

using TracedRanks = std::vector<std::vector<monitor::report::TracedStep>>;

// Where none is given: operations (program/facts.h), in units of what a stage's
// forward of a micro-batch takes on average, over links that take no time.
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

// A stage of the pipeline, by the one of its ranks that holds the most.
struct PlannedStage {
  int64_t rank = 0;  // the lowest
  int64_t num_ranks = 0;
  program::Program program;
  program::Units units;
  program::RankTimes times;
  program::Memory memory;  // beyond the states
  int64_t state_bytes = 0;
  int64_t peak_bytes = 0;  // with the states
};

struct StepPlan {
  std::string schedule;  // with its micro-batches, in words
  std::string unit;      // of time: "s", or in words
  std::string costs;     // where times are from, in words
  double step = 0;
  double bubble = 0;  // the mean share of the step
  int64_t world_size = 0;
  std::vector<PlannedStage> stages;
};

// "33 forwards", "12.5ms": of a plan's unit.
std::string amount(double time, const std::string& unit);

// REQUIRES: a completed configuration of ranks (not of mesh.data_parallel dp).
// TS_CHECK_CONFIG where a trace is of another mesh, or of other programs.
StepPlan plan_step(const RunConfig& config, const PlanCosts& costs);

// As rows of a drawing, a stage each.
monitor::report::Panel panel_of(const StepPlan& plan);
// Of the same stages, as they ran: the traced step of median length.
monitor::report::Panel panel_of(const TracedRanks& traced,
                                const StepPlan& plan);

// Of a pipeline with fewer micro-batches than twice its stages: how much of a
// step is bubble where stages are alike and a backward takes two forwards, and
// what would halve it; "" for others. REQUIRES: a completed configuration.
std::string bubble_hint(const RunConfig& config);

}  // namespace tessera::engine
