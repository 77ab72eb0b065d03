// A set of samples: tokens, and the order in which steps take them.
//
// Several sources are mixed by their weights; of each some samples may be held
// out, evenly spread, which are then a set of their own.
//
// Shapes:  Batch.inputs, .targets: (B, T) int64 on the CPU; targets[b][t] is
//          the token behind inputs[b][t], or kIgnoreIndex where it does not
//          count; document_starts: the place in the sample where the
//          token's document begins, not defined where no source keeps its
//          documents apart; B samples, T = seq_len.
// Threads: any may ask for batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/hold_out.h"
#include "tessera/data/sampler.h"
#include "tessera/data/token_stream.h"

namespace tessera::data {

struct Batch {
  at::Tensor inputs;   // (B, T)
  at::Tensor targets;  // (B, T)
  at::Tensor document_starts = {};
  int64_t unpadded = 0;  // tokens of each before what fills it up; 0: all
};

struct Source {
  std::string name;                           // "data.train", for messages
  std::shared_ptr<const TokenStream> tokens;  // nullptr: another rank has them
  double weight = 1;
  int64_t num_tokens = 0;  // of another rank
  int64_t size() const { return tokens ? tokens->size() : num_tokens; }
};

// All samples, those that are left to train on, or those that are held out.
enum class Part { kAll, kKept, kHeldOut };

struct Held {
  double share = 0;  // of each source's samples
  Part part = Part::kAll;
};

// Of sources with so many samples; each keeps one at least. TS_CHECK_CONFIG
// where the share is no sample.
std::vector<HoldOut> hold_out(const std::vector<int64_t>& sizes, double share);

// Where another rank has the tokens, the order of the samples alone is known.
class Dataset {
 public:
  // `name`: "data.train", for messages.
  Dataset(TokenStream tokens, const SamplerOptions& options,
          const std::string& name = "data");
  // TS_CHECK_CONFIG names a source without a sample, and a share that is none.
  Dataset(std::vector<Source> sources, const SamplerOptions& options,
          const Held& held = {});

  // REQUIRES, but for sampler(), go_on() and leave_out(): this rank has the
  // tokens.
  // Samples first .. first + count - 1 of the step's global batch.
  Batch batch(int64_t step, int64_t first, int64_t count) const;
  // Has the system read them ahead, while something else is done.
  void will_need(int64_t step, int64_t first, int64_t count) const;
  // Samples first .. first + count - 1 in the order of the data, as validation
  // reads them; of samples held out in one drawn once, whatever the seed, so
  // that the first ones are like all. REQUIRES: first + count <=
  // sampler().num_samples().
  Batch in_order(int64_t first, int64_t count) const;

  // Targets of the step's global batch that count; of those `depth` tokens
  // behind them (ahead.h).
  int64_t num_targets(int64_t step, int64_t depth = 0) const;

  const Sampler& sampler() const { return sampler_; }
  // See Sampler::go_on().
  void go_on(int64_t step, int64_t taken) { sampler_.go_on(step, taken); }
  // See Sampler::leave_out().
  void leave_out(const std::vector<Skip>& more) { sampler_.leave_out(more); }

 private:
  int64_t num_targets_of(int64_t sample, int64_t depth) const;
  Batch gather(const std::vector<int64_t>& samples) const;
  // The source of a sample, and the sample in it.
  Mixture::Place place_of(int64_t sample) const;
  void read(int64_t sample, const Batch& batch, int64_t row) const;

  std::vector<Source> sources_;
  Part part_;
  std::vector<HoldOut> parts_;  // of each source's samples
  Sampler sampler_;
};

}  // namespace tessera::data
