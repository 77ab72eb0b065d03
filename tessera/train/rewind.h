// Going back behind a spike (spike.action rewind): to which checkpoint, and
// without which samples.
//
// The run begins again there, in the same process, as one that is resumed with
// these samples in data.skip: it computes the bits of a run that never saw
// them. Checkpoints keep what was left out, so that whoever goes on from them
// leaves it out too; until there is one, a file of the run's checkpoint folder
// does, `rewound`, for the checkpoint there to which it went back.
// Comm:   collective; all ranks read that checkpoint, for its checksums.
// Errors: TS_CHECK on the spike behind the last time that spike.max_rewinds
//         allows, TS_CHECK_IO where all that lie before the spike are damaged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/data/sampler.h"
#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

struct Rewind {
  std::string resume;                     // TrainOptions::resume
  int64_t num_rewinds = 0;                // with this one
  std::vector<data::Skip> left_out = {};  // by all of them
};

// How the run stands when its step has a spike.
struct SpikePlace {
  int64_t step = 0;           // from 1
  std::string resume;         // as it was begun
  bool has_saved = false;     // since then
  int64_t first_samples = 0;  // taken before it was begun
  int64_t line_base = -1;     // SavedRun's
  Rewind so_far;
};

// `sampler`: as the step took its samples.
Rewind find_rewind(const engine::RunConfig& config, const RunFolder& folder,
                   const data::Sampler& sampler, const SpikePlace& spike,
                   comm::Group& world);

// What a run had left out when it went back to this checkpoint of its folder,
// and was ended before the next one. Comm: collective; rank 0 looks.
Rewind kept_rewind(const RunFolder& folder, int64_t step, comm::Group& world);

// The newest commit in the folder; -1: none. Comm: collective; rank 0 looks.
int64_t newest_commit(const RunFolder& folder, comm::Group& world);

}  // namespace tessera::train
