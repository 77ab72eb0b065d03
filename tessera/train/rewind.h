// Going back behind a spike (spike.action rewind): to which checkpoint, and
// without which samples.
//
// The run begins again there, in the same process, as one that is resumed with
// these samples in data.skip: it computes the bits of a run that never saw
// them. Checkpoints keep what was left out, so that whoever goes on from them
// leaves it out too.
// Comm:   find_rewind() is collective: rank 0 looks, the others hear of it.
// Errors: TS_CHECK on the spike behind the last time that spike.most allows.
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
  std::string resume;  // TrainOptions::resume
  int64_t count = 0;   // times that the run went back, with this one
  std::vector<data::Skip> left_out = {};  // each time, in samples
};

// How the run stands when its step has a spike.
struct SpikePlace {
  int64_t step = 0;           // from 1
  std::string resume;         // as it was begun
  bool has_saved = false;     // since then
  int64_t first_samples = 0;  // taken before it was begun
  Rewind before;              // what went before
};

// `sampler`: as the step took its samples.
Rewind find_rewind(const engine::RunConfig& config, const RunFolder& folder,
                   const data::Sampler& sampler, const SpikePlace& spike,
                   comm::Group& world);

}  // namespace tessera::train
