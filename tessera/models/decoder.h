// One decoder for GPT-2, Llama, Qwen2 and Qwen3: token embedding, pre-norm
// layers of attention and MLP, a last norm, a head.
//
// Shapes: ids, targets: (B, T) of int64; hidden: (B, T, D); logits: (B, T, V).
//         T is at most ModelConfig::max_seq.
// Names:  embed.tokens, embed.positions, blocks.N.{attention_norm,
//         attention.{q, k, v, o, q_norm, k_norm}, mlp_norm,
//         mlp.{gate, up, down}}, final_norm, head. With tied embeddings there
//         is no head: embed.tokens serves.
// Use:    construct, nn::materialise, then run.
// Comm:   none.
// Threads: a decoder belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/models/family.h"
#include "tessera/models/model_config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/loss.h"
#include "tessera/nn/rotary.h"

namespace tessera::models {

// x + attention(norm(x)), then y + mlp(norm(y)).
class DecoderBlock : public torch::nn::Module {
 public:
  // REQUIRES: a complete config.
  explicit DecoderBlock(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x, const nn::Rotation& rotation,
                     nn::KvCache* cache = nullptr) const;

 private:
  std::shared_ptr<nn::Norm> attention_norm_;
  std::shared_ptr<nn::Attention> attention_;
  std::shared_ptr<nn::Norm> mlp_norm_;
  std::shared_ptr<nn::Mlp> mlp_;
};

// The keys and values of every layer.
struct DecoderCache {
  std::vector<nn::KvCache> layers;
  int64_t length() const { return layers.empty() ? 0 : layers[0].length; }
};

class Decoder : public torch::nn::Module {
 public:
  explicit Decoder(ModelConfig config);

  // (B, T) -> logits (B, T, V).
  at::Tensor forward(const at::Tensor& ids);
  // Sum of the cross-entropy over the targets; see nn/loss.h.
  nn::LossSum loss(const at::Tensor& ids, const at::Tensor& targets);

  // The tokens that follow those in the cache -> logits of the last (B, V).
  at::Tensor forward_cached(const at::Tensor& ids, DecoderCache& cache);
  // An empty cache with room for `capacity` tokens.
  DecoderCache make_cache(int64_t capacity) const;

  // Complete: without the zeros that stand for a default.
  const ModelConfig& config() const { return config_; }

 private:
  at::Tensor embed(const at::Tensor& ids, int64_t begin) const;
  at::Tensor hidden(const at::Tensor& ids, DecoderCache* cache);
  at::Tensor logits_of(const at::Tensor& hidden) const;

  ModelConfig config_;
  std::shared_ptr<nn::Embedding> tokens_;
  std::shared_ptr<nn::Embedding> positions_;  // of learned positions
  std::vector<std::shared_ptr<DecoderBlock>> blocks_;
  std::shared_ptr<nn::Norm> final_norm_;
  std::shared_ptr<nn::Linear> head_;  // where it is not tied
  nn::RotaryTable rotary_;
};

// Elements of all parameters, a tied one once.
int64_t num_parameters(const ModelConfig& config);

// Floating-point operations of forward and backward for one token of a sequence
// of seq_len, as MFU counts them (Chowdhery et al., PaLM, arXiv 2204.02311,
// appendix B): 6 a weight that multiplies, the head's included and embedding
// look-ups not, and 12 * layers * heads * head_dim * seq_len for attention.
int64_t flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace tessera::models
