// What a module of multi-token prediction has beside its transformer block: the
// way from hidden states and the tokens ahead of them into it, and its norm.
//
//   h'_i = M [RMSNorm(Emb(t_{i+k})) ; RMSNorm(h_i)]
//
// The columns of M lie as published weights have them (eh_proj of DeepSeek-V3,
// as vLLM, SGLang and Megatron-Core read it): those of the embedding first,
// where the paper writes h first. h is what the head takes of the depth before:
// behind its norm, as there too.
//
// Shapes: embedded, hidden, y: (B, T, D); M: (D, 2 D).
// Comm:   none: with sequence parallelism each rank has its part of T.
// Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, eq. 21 to 23.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/nn/blocks.h"

namespace tessera::models {

struct AheadOptions {
  nn::NormKind norm = nn::NormKind::kRmsNorm;
  int64_t width = 0;  // D
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

class AheadModule : public torch::nn::Module {
 public:
  explicit AheadModule(const AheadOptions& options);
  // h'.
  at::Tensor enter(const at::Tensor& embedded, const at::Tensor& hidden) const;
  // What the head takes of what the block gave, behind what it takes of the
  // depths before, on dim 0.
  at::Tensor leave(const at::Tensor& before, const at::Tensor& y) const;

 private:
  std::shared_ptr<nn::Norm> token_norm_, hidden_norm_;
  std::shared_ptr<nn::Linear> proj_;
  std::shared_ptr<nn::Norm> norm_;
};

}  // namespace tessera::models
