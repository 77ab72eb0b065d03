// Going back behind a spike (spike.action rewind): to which checkpoint, and
// without which samples.
//
// The run begins again there, in the same process, as one that is resumed with
// these samples in data.skip: it computes the bits of a run that never saw
// them. Checkpoints keep what was left out, so that whoever goes on from them
// leaves it out too; until there is one, a file of the run's checkpoint folder
// does, kRewoundName, for the checkpoint to which it went back.
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
#include "tessera/train/state.h"

namespace tessera::train {

// That file, in the folder of checkpoints.
constexpr char kRewoundName[] = "rewound";

struct Rewind {
  std::string resume = "auto";            // TrainOptions::resume
  int64_t num_rewinds = 0;                // with this one
  std::vector<data::Skip> left_out = {};  // by all of them
  int64_t line_base = -1;                 // SavedRun's
};

// How the run stands when its step has a spike.
struct SpikePlace {
  int64_t step = 0;           // from 1
  bool has_saved = false;     // since it was begun, by so_far.resume
  int64_t first_samples = 0;  // taken before that
  Rewind so_far;
};

// `sampler`: as the step took its samples.
Rewind find_rewind(const engine::RunConfig& config, const RunFolder& folder,
                   const data::Sampler& sampler, const SpikePlace& spike,
                   comm::Group& world);

// Adds what the checkpoint knows that a run with `so_far.resume` went on from,
// and who went back to it last; rank 0 tells what is left out. Collective.
void add_rewinds(Rewind& so_far, const Resumed& found, const RunFolder& folder,
                 int64_t global_batch, comm::Group& world);

}  // namespace tessera::train
