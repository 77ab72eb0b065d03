// Multi-head latent attention: keys and values of all heads are made of one
// narrow vector of each token, and so may queries be.
//
//   c^Q = norm(x W_qa)                q_i = c^Q W_qb,i, or x W_q,i
//   c^KV, k^R = x W_kva               k^C_i, v_i = norm(c^KV) W_kvb,i
//   q_i = [q^C_i; RoPE(q^R_i)]        k_i = [k^C_i; RoPE(k^R)]
//
// Shapes: x: (B, T, D); q_i, k_i: E = content + rope_dim wide; v_i: value_dim,
//         at most E, which the core sees with zeros behind it; k^R is one for
//         all heads. Its pairs are the even and odd features, as DeepSeek's.
// Ranks:  heads are shared out; the latent vectors are made on each rank.
// Norms:  their epsilon is 1e-6, whatever the model's.
// Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1 and appendix C.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tessera/nn/attention.h"

namespace tessera::nn {

struct LatentAttentionOptions {
  int64_t width = 0;  // D
  int64_t heads = 0;
  int64_t head_dim = 0;  // E
  int64_t rope_dim = 0;  // of these
  int64_t value_dim = 0;
  int64_t q_rank = 0;  // width of c^Q; 0: queries are made of x
  int64_t kv_rank = 0;
  double q_scale = 1;  // beside 1 / sqrt(E) in the softmax
  double init_std = 0.02;
  double out_init_std = 0.02;
};

class LatentAttention final : public Attention {
 public:
  explicit LatentAttention(const LatentAttentionOptions& options);

 private:
  Projected project(const at::Tensor& x,
                    const Rotation& rotation) const override;

  LatentAttentionOptions options_;
  std::shared_ptr<Linear> q_, q_a_, q_b_;  // q, or the others
  std::shared_ptr<Norm> q_a_norm_;
  std::shared_ptr<Linear> kv_a_, kv_b_;
  std::shared_ptr<Norm> kv_a_norm_;
};

}  // namespace tessera::nn
