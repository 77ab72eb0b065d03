// One decoder for every family (family.h): token embedding, layers of attention
// and MLP or experts, each with its norm, a last norm, a head.
//
// Names:  embed.tokens, embed.positions, blocks.N.{attention_norm,
//         attention.{q, k, v, o, q_norm, k_norm}, or of latent attention
//         attention.{q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o}, mlp_norm,
//         mlp.{gate, up, down}, moe.{gate, noise, score_bias}, moe.{experts,
//         shared}.{gate, up, down}}, final_norm, head. With norms before and
//         behind, the latter are {attention, mlp}_norm_behind. With tied
//         embeddings there is no head: embed.tokens serves. Blocks behind the
//         layers have blocks.N.mtp.{token_norm, hidden_norm, proj, norm} too.
// Seams:  see Model. Every block has the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/models/ahead_module.h"
#include "tessera/models/family.h"
#include "tessera/models/model.h"
#include "tessera/nn/rotary.h"

namespace tessera::models {

// Of a block: of attention's weights, and of what attention and MLP add to x.
struct BlockDropout {
  nn::Dropout weights = {}, attention = {}, mlp = {};
  nn::Positions positions = {};
};

// x + attention(norm(x)), then y + mlp(norm(y)), or with norms behind
// x + norm(attention(x)), then y + norm(mlp(y)), or with both; a layer with
// experts has moe in place of mlp. Of what is added a part is dropped.
class DecoderBlock : public torch::nn::Module {
 public:
  // Layer `index` of a complete config.
  DecoderBlock(const ModelConfig& config, int64_t index);
  at::Tensor forward(const at::Tensor& x, const nn::Places& places,
                     const nn::MoeTokens& experts = {},
                     nn::KvCache* cache = nullptr,
                     nn::CoreAgain* again = nullptr,
                     const BlockDropout& dropout = {}) const;

  const std::shared_ptr<nn::Attention>& attention() const { return attention_; }
  const std::shared_ptr<nn::Mlp>& mlp() const { return mlp_; }  // or null
  const std::shared_ptr<nn::Moe>& moe() const { return moe_; }  // or null

 private:
  // Those of a part; null where it has none there.
  struct Norms {
    std::shared_ptr<nn::Norm> before, behind;
  };
  Norms make_norms(const ModelConfig& config, const std::string& name);

  Norms attention_norms_;
  std::shared_ptr<nn::Attention> attention_;
  Norms mlp_norms_;
  std::shared_ptr<nn::Mlp> mlp_;
  std::shared_ptr<nn::Moe> moe_;
};

class Decoder final : public Model {
 public:
  explicit Decoder(const ModelConfig& config);

  int64_t num_units() const override {
    return static_cast<int64_t>(blocks_.size()) + 2;
  }
  at::Tensor forward_unit(int64_t unit, const at::Tensor& x,
                          const Tokens& tokens, nn::Balance* balance = nullptr,
                          nn::CoreAgain* again = nullptr) override;
  at::Tensor forward_unit_cached(int64_t unit, const at::Tensor& x,
                                 int64_t begin, Cache& cache) override;

  void set_region(const nn::Region& region) override;
  void set_vocabulary(const VocabularyShard& shard) override;
  void set_attention(const nn::Attention::Core& core) override;
  void set_experts(const nn::ExpertShard& shard) override;

 private:
  void assign_units(torch::nn::Module& embed);
  nn::Rotation rotation_of(int64_t layer, int64_t begin, int64_t tokens,
                           const at::Tensor& like);
  // Without documents, where `document_starts` is not defined.
  at::Tensor embed(const at::Tensor& ids, int64_t begin,
                   const at::Tensor& document_starts = {}) const;
  // The first unit, and what modules ahead take of their tokens; `name`: of
  // its dropout.
  at::Tensor embed_dropped(const at::Tensor& ids, const Tokens& tokens,
                           const std::string& name);
  at::Tensor run_block(int64_t layer, const at::Tensor& x, const Tokens& tokens,
                       nn::Balance* balance, nn::CoreAgain* again);
  at::Tensor enter_ahead(int64_t depth, const at::Tensor& x,
                         const Tokens& tokens);
  at::Tensor predict_ahead(int64_t unit, const at::Tensor& x,
                           const Tokens& tokens, nn::Balance* balance,
                           nn::CoreAgain* again);
  // Of x whose part ahead, so many on dim 0 behind the others, has its norms.
  at::Tensor before_head(const at::Tensor& x, int64_t ahead = 0) const;
  bool drops(const Tokens& tokens) const {
    return config().dropout > 0 && tokens.draw;
  }
  BlockDropout block_dropout(int64_t layer, const Tokens& tokens) const;
  nn::Positions expert_positions(const DecoderBlock& block,
                                 const Tokens& tokens) const;
  at::Tensor head_weight() const override;

  std::shared_ptr<nn::Embedding> tokens_;
  std::shared_ptr<nn::Embedding> positions_;  // of learned positions
  std::vector<std::shared_ptr<DecoderBlock>> blocks_;
  std::vector<std::shared_ptr<AheadModule>> ahead_;  // of the last blocks
  std::shared_ptr<nn::Norm> final_norm_;
  std::shared_ptr<nn::Linear> head_;  // where it is not tied
  nn::RotaryTable rotary_, local_rotary_;
  nn::Transform enter_head_;
};

}  // namespace tessera::models
