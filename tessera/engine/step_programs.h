// The programs of a step and of an evaluation, of every rank of the mesh:
// proved together before the first one runs.
//
// Comm:   none: every rank makes and proves the same.
// Errors: TORCH_INTERNAL_ASSERT, of the checkers: a programmer's error.
#pragma once

#include <compare>
#include <map>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/parallel/model_units.h"
#include "tessera/program/facts.h"
#include "tessera/program/passes/pass.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::engine {

// Where a rank is, as far as its program, its transfers and its facts ask:
// along pp and tp, and among data-parallel ranks where these have different
// numbers of samples.
struct RankKind {
  int64_t stage = 0, tp = 0, data = 0;
  auto operator<=>(const RankKind&) const = default;
};
RankKind kind_of(const RunConfig& config, const mesh::DeviceMesh& mesh,
                 const mesh::Coord& coord);

// Of the ranks of one stage. `steps`: of a schedule that goes on; one of all
// others.
program::Program lowered_program(
    const RunConfig& config, const mesh::DeviceMesh& mesh,
    const parallel::ModelUnits& model, int64_t stage, program::Purpose purpose,
    const program::passes::Choice& choice = {},
    int64_t steps = program::schedules::kStepsTogether);

// What the environment variables TESSERA_WITHOUT_PASSES and TESSERA_WITH_PASSES
// name, separated by commas: to see what a pass is worth, and that it changes
// no bit. Refuses passes that cannot be left out, or asked for.
program::passes::Choice passes_chosen();

// Whether the programs of this configuration may be without that pass.
bool can_be_without(const RunConfig& config, const program::passes::Pass& pass);
// TS_CHECK_CONFIG where they can't, or have none of those that are asked for.
void check_passes(const RunConfig& config,
                  const program::passes::Choice& choice);

// What a rank's instructions move, in all its programs; which ranks, is said of
// `lanes`. `facts`: this rank's, of config.with(model.config), in which nothing
// is left open. REQUIRES, here and below: a completed configuration.
program::RankProgram transfers_of(const RunConfig& config,
                                  const mesh::DeviceMesh& mesh,
                                  const parallel::ModelUnits& model,
                                  int64_t rank, parallel::Lanes& lanes,
                                  const program::Facts& facts);

// Of a step between two flushes; and, of a schedule that goes on, of those that
// find their batch begun, or begin the next one's.
struct StepPrograms {
  program::Program alone, first, steady, last;
  const program::Program& of(bool is_begun, bool begins_next) const;
};

struct RankPrograms {
  program::Program evaluation;
  StepPrograms step;
};

// A rank's programs for these purposes, proved together with those of all
// others.
RankPrograms proved_programs(const RunConfig& config,
                             const mesh::DeviceMesh& mesh,
                             const parallel::ModelUnits& model, int64_t rank,
                             const std::vector<program::Purpose>& purposes,
                             const program::passes::Choice& choice = {});

}  // namespace tessera::engine
