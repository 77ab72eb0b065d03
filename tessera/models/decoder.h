// One decoder for GPT-2, Llama, Qwen2, Qwen3 and Mixtral: token embedding,
// pre-norm layers of attention and MLP or experts, a last norm, a head.
//
// Shapes: ids, targets: (B, T) of int64; hidden: (B, T, D); logits: (B, T, V).
//         T is at most ModelConfig::max_seq.
// Names:  embed.tokens, embed.positions, blocks.N.{attention_norm,
//         attention.{q, k, v, o, q_norm, k_norm}, mlp_norm,
//         mlp.{gate, up, down}, moe.gate, moe.experts.E.{gate, up, down}},
//         final_norm, head. With tied embeddings there is no head:
//         embed.tokens serves.
// Units:  what is run, gathered and recomputed as one: unit 0 embeds, unit n is
//         block n - 1, the last one has the final norm and the head.
// Use:    construct, nn::materialise, then run, whole or unit by unit.
// Comm:   none of its own; see nn::Transform.
// Threads: a decoder belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/models/family.h"
#include "tessera/models/model_config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/loss.h"
#include "tessera/nn/moe.h"
#include "tessera/nn/rotary.h"

namespace tessera::models {

// x + attention(norm(x)), then y + mlp(norm(y)); a layer with experts has moe
// in place of mlp.
class DecoderBlock : public torch::nn::Module {
 public:
  // REQUIRES: a complete config.
  DecoderBlock(const ModelConfig& config, bool has_experts);
  at::Tensor forward(const at::Tensor& x, const nn::Rotation& rotation,
                     nn::KvCache* cache = nullptr,
                     nn::Balance* balance = nullptr) const;

  const std::shared_ptr<nn::Norm>& attention_norm() const {
    return attention_norm_;
  }
  const std::shared_ptr<nn::Attention>& attention() const { return attention_; }
  const std::shared_ptr<nn::Norm>& mlp_norm() const { return mlp_norm_; }
  const std::shared_ptr<nn::Mlp>& mlp() const { return mlp_; }  // or null
  const std::shared_ptr<nn::Moe>& moe() const { return moe_; }  // or null

 private:
  std::shared_ptr<nn::Norm> attention_norm_;
  std::shared_ptr<nn::Attention> attention_;
  std::shared_ptr<nn::Norm> mlp_norm_;
  std::shared_ptr<nn::Mlp> mlp_;
  std::shared_ptr<nn::Moe> moe_;
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
  // Sum of the cross-entropy over the targets; see nn/loss.h. Adds what experts
  // tell of their balance to `balance`, unless it is null.
  nn::LossSum loss(const at::Tensor& ids, const at::Tensor& targets,
                   nn::Balance* balance = nullptr);

  int64_t num_units() const { return static_cast<int64_t>(blocks_.size()) + 2; }
  // The unit to which a parameter belongs. A tied embedding belongs to unit 0,
  // and the last unit reads it too.
  int64_t unit_of(const std::string& parameter) const;
  // ids or hidden -> hidden or logits. `tokens`: T of the ids.
  at::Tensor forward_unit(int64_t unit, const at::Tensor& x, int64_t tokens,
                          nn::Balance* balance = nullptr);
  // `logits` as the last unit gave them: they are given up.
  nn::LossSum loss_of(at::Tensor logits, const at::Tensor& targets) const;

  // For strategies, which shard a decoder's blocks.
  const std::shared_ptr<nn::Embedding>& tokens() const { return tokens_; }
  const std::shared_ptr<nn::Embedding>& positions() const {
    return positions_;  // or null
  }
  const std::vector<std::shared_ptr<DecoderBlock>>& blocks() const {
    return blocks_;
  }
  const std::shared_ptr<nn::Norm>& final_norm() const { return final_norm_; }
  const std::shared_ptr<nn::Linear>& head() const { return head_; }  // or null
  // Applied to the hidden states before the head reads them, whose logits are
  // a part of the vocabulary.
  void set_head(nn::Transform enter, nn::VocabularyShard shard);
  // Hidden states between blocks are part `rank` of `size` of the sequence.
  void set_sequence_shard(int64_t rank, int64_t size);
  int64_t sequence_shards() const { return sequence_size_; }
  // The tokens are equal pieces of a longer sequence, these of them.
  void set_pieces(std::vector<int64_t> pieces);

  // The tokens that follow those in the cache -> logits of the last (B, V).
  at::Tensor forward_cached(const at::Tensor& ids, DecoderCache& cache);
  // An empty cache with room for `capacity` tokens.
  DecoderCache make_cache(int64_t capacity) const;

  // Complete: without the zeros that stand for a default.
  const ModelConfig& config() const { return config_; }

 private:
  // The runs of positions of T tokens, as (begin, length).
  std::vector<std::pair<int64_t, int64_t>> runs_of(int64_t begin,
                                                   int64_t tokens) const;
  nn::Rotation rotation_of(int64_t begin, int64_t tokens,
                           const at::Tensor& like);
  at::Tensor embed(const at::Tensor& ids, int64_t begin) const;
  at::Tensor hidden(const at::Tensor& ids, DecoderCache* cache,
                    nn::Balance* balance);
  at::Tensor logits_of(const at::Tensor& normed) const;
  ModelConfig config_;
  std::shared_ptr<nn::Embedding> tokens_;
  std::shared_ptr<nn::Embedding> positions_;  // of learned positions
  std::vector<std::shared_ptr<DecoderBlock>> blocks_;
  std::shared_ptr<nn::Norm> final_norm_;
  std::shared_ptr<nn::Linear> head_;  // where it is not tied
  nn::RotaryTable rotary_;
  nn::Transform enter_head_;
  nn::VocabularyShard vocabulary_;
  int64_t sequence_rank_ = 0, sequence_size_ = 1;
  std::vector<int64_t> pieces_ = {0};
};

// Whether a parameter, by its name, is one of an expert.
bool is_of_expert(const std::string& parameter);

// Elements of all parameters, a tied one once; and of the experts' among them.
int64_t num_parameters(const ModelConfig& config);
int64_t num_expert_parameters(const ModelConfig& config);

// Floating-point operations of forward and backward for one token of a sequence
// of seq_len, as MFU counts them (Chowdhery et al., PaLM, arXiv 2204.02311,
// appendix B): 6 a weight that multiplies, the head's included, embedding
// look-ups not, of experts the top_k that a token goes to, and 12 * layers *
// heads * head_dim * seq_len for attention.
int64_t flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace tessera::models
