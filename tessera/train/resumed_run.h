// What a run is to go on from, compared with it before any rank starts: by
// manifests and configurations alone, no tensor is read.
//
// Errors: TS_CHECK_CONFIG where the checkpoint is of another run or model, or
//         keeps other states: another optimizer, an average of the weights,
//         another precision. Each key is named with both values, and the way
//         out. TS_CHECK_IO where --resume names no checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"

namespace tessera::train {

// `resume`: TrainOptions::resume; `folder`: of the run's checkpoints, which may
// be missing.

// What `resume` names where that is a run's folder, or that of its checkpoints:
// the newest there; "auto" of `own`, which knows the memory of hosts too. Else
// what it is.
std::string checkpoint_of(const std::string& resume, const RunFolder& own);

// The checkpoint as resume() chooses it, but for what tensors tell; "": none.
std::string resumed_folder(const std::string& resume,
                           const std::string& folder);

// Of a run that goes on from a checkpoint of its own `folder`: that one counts
// as the newest from then on.
void go_on_from(const std::string& resume, const std::string& folder);

// REQUIRES: a completed configuration. What no manifest tells, as damaged
// tensors and the file of a run that went back from a spike, the ranks find,
// by the functions below.
void check_resumed(const engine::RunConfig& config, const std::string& resume,
                   const std::string& folder);

// TS_CHECK_CONFIG where `saved` is of a run of another name that has the same
// checkpoint.dir, of other states, or of another model. `source` names it.
void refuse_another_line(const SavedRun& saved, const engine::RunConfig& config,
                         const std::string& resume, const std::string& source);

// A warning for each thing by which the run goes on otherwise than `saved` was
// trained. `data`, `caches`: as SavedRun has them, of this run.
void warn_of_changes(const SavedRun& saved, const engine::RunConfig& config,
                     uint64_t data, uint64_t caches);

// TS_CHECK_CONFIG where a checkpoint of `saved` has tensors that a run of `now`
// has not, or lacks some. `source` names it.
void refuse_other_states(const engine::RunConfig& saved,
                         const engine::RunConfig& now,
                         const std::string& source);

}  // namespace tessera::train
