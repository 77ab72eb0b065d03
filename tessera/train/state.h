// What a checkpoint of a run holds: the weights, the optimizer's tensors, and
// where the run stood.
//
// Names:  weights "model.<parameter>", the optimizer's "optimizer.<state>", and
//         where gradients are delayed "delayed.<parameter>", the weights that
//         the next step is taken at.
// Comm:   resume() is collective, as checkpoint/checkpoint.h.
// The order of the data needs no state but how many samples were taken, and
// which were left out: it is a pure function of seed and place.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local.h"
#include "tessera/data/sampler.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/compose.h"
#include "tessera/train/best_loss.h"

namespace tessera::train {

// Views on the live tensors: saving reads them, loading fills them.
checkpoint::State state_of(const parallel::Composed& composed,
                           const optim::Optimizer& optimizer);

// What the optimizer has in fp32 of a parameter of a narrow type.
std::string master_of(const std::string& parameter);

// The weights alone.
checkpoint::State weights_of(const parallel::Composed& composed);

// The JSON beside a checkpoint's tensors.
struct SavedRun {
  int64_t step = 0;     // steps done
  int64_t samples = 0;  // that they took
  int64_t tokens = 0;   // in these
  std::string config;   // as resolved: config.json's text
  // Hash of the fingerprints of what is trained on; 0: of an older version,
  // which took others too.
  uint64_t data = 0;
  // Of the caches of its tokens; 0: there are none, or of an older version.
  uint64_t caches = 0;
  std::optional<BestLoss> best = {};  // none: not validated so far
  int64_t skipped = 0;  // of the steps: those that updated nothing
  std::optional<optim::LossScaleState> loss_scale = {};  // none: not scaled
  // Of spike.action: the newest losses, how often the run went back, and what
  // it left out then.
  std::vector<double> losses = {};
  int64_t num_rewinds = 0;
  std::vector<data::Skip> left_out = {};
  // Of a run that went on from a checkpoint elsewhere: the newest commit that
  // its own folder had then, which is of another line of steps, as all before
  // it are. -1: none.
  int64_t line_base = -1;
};

std::string to_json(const SavedRun& run);
// TS_CHECK_IO on text that is not a SavedRun; `source` names it.
SavedRun saved_run_from(const std::string& text, const std::string& source);

// TS_CHECK_IO on ranges of samples that are not ascending and apart, as
// SavedRun::left_out is; `where` names them.
void require_ranges(const std::vector<data::Skip>& ranges,
                    const std::string& where);

// The first of these ranges, for people: in batches where all steps of `run`
// had as many samples.
std::string left_out_text(const std::vector<data::Skip>& ranges,
                          const SavedRun& run, int64_t global_batch);

// --resume never wants a `folder` without checkpoints.
void check_resume(const std::string& resume, const std::string& folder);

struct Resumed {
  SavedRun run;
  bool is_local = false;  // from the memory of hosts
};

// Fills the state by `resume`: "auto", the newest good checkpoint in `folder`,
// or of `local` (nullptr: there are none) where one goes on from there, if
// there is any; "never", none, as check_resume() wants it; else the checkpoint
// folder of that path.
std::optional<Resumed> resume(const std::string& resume,
                              const std::string& folder,
                              checkpoint::LocalCheckpoints* local,
                              checkpoint::State& state, comm::Group& world);

}  // namespace tessera::train
