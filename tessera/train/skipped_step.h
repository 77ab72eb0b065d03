// A step that updated nothing, in the log: that there was one, and who made its
// gradient infinite or no number; one that ends the run, too.
#pragma once

#include <cstdint>

#include "tessera/comm/communicator.h"
#include "tessera/data/dataset.h"
#include "tessera/engine/rank_model.h"

namespace tessera::train {

// `step` counts from 1; `skipped`: so far, over all runs.
void tell_of_skipped_step(engine::ModelActor& actor, int64_t step,
                          int64_t skipped);

// Runs the step once more, without an update, and looks at the unit's gradients
// behind each of its backwards, before anything is reduced: the first one that
// is not finite is named by its rank, with the samples of its micro-batch.
//
// Comm:  collective over the world, as the step was.
// REQUIRES: the step that ran last, number `step` from 0, was skipped; `input`
//           is that step's.
void name_nonfinite(const engine::RunConfig& config, engine::RankModel& model,
                    const data::Dataset& data, comm::Group& world, int64_t step,
                    engine::StepInput input);

}  // namespace tessera::train
