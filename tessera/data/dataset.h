// A set of samples: tokens, and the order in which steps take them.
//
// Shapes:  Batch.inputs, .targets: (B, T) int64 on the CPU; targets[b][t] is
//          the token behind inputs[b][t], or kNoTarget where it does not
//          count; B samples, T = seq_len.
// Threads: any may ask for batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/data/sampler.h"
#include "tessera/data/token_stream.h"

namespace tessera::data {

struct Batch {
  at::Tensor inputs;   // (B, T)
  at::Tensor targets;  // (B, T)
};

class Dataset {
 public:
  // `name`: "data.train", for messages.
  Dataset(TokenStream tokens, const SamplerOptions& options,
          const std::string& name = "data");

  // Samples first .. first + count - 1 of the step's global batch.
  Batch batch(int64_t step, int64_t first, int64_t count) const;
  // Samples first .. first + count - 1 in the order of the data, as validation
  // reads them. REQUIRES: first + count <= sampler().num_samples().
  Batch in_order(int64_t first, int64_t count) const;

  // Targets of the step's global batch that count.
  int64_t num_targets(int64_t step) const;

  const Sampler& sampler() const { return sampler_; }
  const TokenStream& tokens() const { return tokens_; }

 private:
  Batch gather(const std::vector<int64_t>& samples) const;

  TokenStream tokens_;
  Sampler sampler_;
};

}  // namespace tessera::data
