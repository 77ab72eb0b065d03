// Samples tokens from a decoder, one after another, with a cache of keys and
// values.
//
// Bits:   token i drawn is a pure function of (weights, prompt, options, i).
// Errors: an empty prompt, or one that leaves no room in max_seq, is
//         TS_CHECK_CONFIG; logits that are no numbers are TS_CHECK.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/model.h"
#include "tessera/models/sampling.h"

namespace tessera::models {

struct GenerateOptions {
  int64_t max_new_tokens = 100;  // fewer where max_seq is reached
  SamplingOptions sampling{};
  uint64_t seed = 0;
  int64_t sample = 0;      // of those with this seed, each another text
  int64_t num_tokens = 0;  // ids at and above are never drawn; 0: all may be
  std::vector<int64_t> stop_tokens{};  // end the text, and are not returned
};

// Called with each new token; false ends the text.
using OnToken = std::function<bool(int64_t token)>;

// Draws a token by logits (V).
using Draw = std::function<int64_t(const at::Tensor& logits)>;
// What follows `ids`, the tokens since the last call: drawn here, or known from
// another rank, which drew it.
using NextToken =
    std::function<int64_t(const std::vector<int64_t>& ids, const Draw& draw)>;

// TS_CHECK_CONFIG where a model can write no text at all.
void check_writes(const ModelConfig& config);

// TS_CHECK_CONFIG where no text can follow the prompt with these options.
void check_generation(const ModelConfig& config,
                      const std::vector<int64_t>& prompt,
                      const GenerateOptions& options);

// Tokens that the prompt and what follows it can be at most.
int64_t longest_text(const ModelConfig& config,
                     const std::vector<int64_t>& prompt,
                     const GenerateOptions& options);

// The new tokens, without the prompt.
std::vector<int64_t> generate(const ModelConfig& config,
                              const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const NextToken& next,
                              const OnToken& on_token = nullptr);
// By a model that is whole here.
std::vector<int64_t> generate(Model& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const OnToken& on_token = nullptr);

}  // namespace tessera::models
