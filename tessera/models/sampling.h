// Which token comes next: filters of a model's scores as transformers'
// processors apply them, in their order: repetition penalty, temperature,
// top k, top p, min p.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera::models {

struct SamplingOptions {
  double temperature = 1.0;  // 0: always the likeliest token
  int64_t top_k = 0;         // draw among the k likeliest; 0: all
  double top_p = 1.0;  // among the fewest likeliest that reach this probability
  double min_p = 0.0;  // and that have this share of the likeliest's
  // Scores of tokens that are in the text, divided where positive, else
  // multiplied (Keskar et al. 2019, arXiv 1909.05858).
  double repetition_penalty = 1.0;
};

// What the program draws by, unless it is told otherwise.
inline constexpr SamplingOptions kUsualSampling{.temperature = 0.8,
                                                .top_k = 50};

// Logits (V) as scores in fp64 on the CPU, -inf for what is not to be drawn.
// `seen`: the tokens of the text so far. TS_CHECK where a logit is no number.
at::Tensor sampling_scores(const at::Tensor& logits,
                           std::span<const int64_t> seen,
                           const SamplingOptions& options);

// `uniform` in [0, 1) picks a token by its probability.
int64_t draw_token(const at::Tensor& scores, const SamplingOptions& options,
                   double uniform);

// TS_CHECK_CONFIG on values that mean nothing.
void check_sampling(const SamplingOptions& options);

}  // namespace tessera::models
