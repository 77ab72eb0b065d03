// Samples tokens from a decoder, one after another, with a cache of keys and
// values.
//
// Bits:   token i drawn is a pure function of (weights, prompt, options, i).
// Errors: an empty prompt, or one that leaves no room in max_seq, is
//         TS_CHECK_CONFIG.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/model.h"

namespace tessera::models {

struct GenerateOptions {
  int64_t max_new_tokens = 100;  // fewer where max_seq is reached
  double temperature = 1.0;      // 0: always the likeliest token
  int64_t top_k = 0;             // draw among the k likeliest; 0: all
  double top_p = 1.0;  // among the fewest likeliest that reach this probability
  uint64_t seed = 0;
  int64_t num_tokens = 0;  // ids at and above are never drawn; 0: all may be
  std::vector<int64_t> stop_tokens{};  // end the text, and are not returned
};

// Called with each new token; false ends the text.
using OnToken = std::function<bool(int64_t token)>;

// The new tokens, without the prompt.
std::vector<int64_t> generate(Model& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const OnToken& on_token = nullptr);

}  // namespace tessera::models
