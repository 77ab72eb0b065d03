// Causal self-attention: with grouped query heads, or with keys and values that
// are made of a narrow latent vector of each token (latent_attention.h).
//
// Shapes: x: (B, T, D); q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H:
//         query head h reads key/value head h / (H / K). H * E need not be D.
// Kernel: on the CPU flash_attention.h's; elsewhere, and with a cache, flash
//         attention of LibTorch: memory grows with T, not with its square. Of
//         documents apart: piece_attention.h's. With dropout, whose masks
//         LibTorch's has not, always flash_attention.h's, or elsewhere
//         composed_attention.h's. With a window also, but elsewhere LibTorch's
//         with a mask of T x T.
// Cache:  with a KvCache the T tokens follow those already in it; the cache
//         keeps their keys and values. For generation, without autograd.
// Comm:   none. Heads are counted from the local weights, so a rank that holds
//         a share of the heads runs the same code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tessera/nn/blocks.h"
#include "tessera/nn/core_again.h"
#include "tessera/nn/piece_attention.h"
#include "tessera/nn/rotary.h"

namespace tessera::nn {

// RMSNorm of q and of k, before rotation: over each head, or over all of them.
enum class QkNorm { kNone, kPerHead, kAllHeads };

// Of the tokens, beside their vectors.
struct Places {
  Rotation rotation = {};  // empty: positions are left to the embedding
  // Which tokens each sees; what is dropped is by heads of the whole model.
  Sight sight = {};
};

// Keys and values of one layer. Room for `capacity` tokens is made at the first
// use.
struct KvCache {
  int64_t capacity = 0;
  int64_t length = 0;
  at::Tensor keys{};  // (B, capacity, K, E)
  at::Tensor values{};
};

// Of q (B, T, H, E) over k and v (B, T, K, E) -> (B, T, H, E).
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Sight& sight);

// What every kind of attention has: heads, some of which are here, and `o`.
class Attention : public Block {
 public:
  // With `again` the core keeps q, k and v alone, and it says how the rest is
  // computed before the backward.
  // REQUIRES: with a cache, neither documents nor dropout, nor `again`.
  at::Tensor forward(const at::Tensor& x, const Places& places,
                     KvCache* cache = nullptr,
                     CoreAgain* again = nullptr) const;

  // The ranks hold some of the heads each.
  virtual void set_region(const Region& region);
  // causal_attention(), where T is a part of the sequence.
  using Core =
      std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const Sight& sight)>;
  void set_core(Core core) { core_ = std::move(core); }

 protected:
  struct Heads {
    int64_t count = 0;
    int64_t value_dim = 0;  // of v, beyond which it is zeros; at most E
    double q_scale = 1;     // of q, beyond the 1 / sqrt(E) of scores
  };
  explicit Attention(const Heads& heads) : heads_(heads) {}
  // The last module of an attention, behind those that make q, k and v.
  void make_output(const LinearOptions& options);
  struct Projected {
    at::Tensor q, k, v;
  };
  virtual Projected project(const at::Tensor& x,
                            const Rotation& rotation) const = 0;

 private:
  // (B, T, H value_dim).
  at::Tensor core(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const Sight& sight) const;
  at::Tensor heads_out(const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const Sight& sight) const;
  at::Tensor flat(const at::Tensor& y) const;

  Heads heads_;
  int64_t first_head_ = 0;  // of those that are here
  Transform enter_;
  Core core_;
  std::shared_ptr<Linear> o_;
};

struct AttentionOptions {
  int64_t width = 0;  // D
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool out_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  NormKind norm = NormKind::kRmsNorm;  // of them; kAllHeads: no other
  double norm_eps = 1e-6;
  double q_scale = 1;
  double init_std = 0.02;
  double out_init_std = 0.02;
};

class GroupedQueryAttention final : public Attention {
 public:
  explicit GroupedQueryAttention(const AttentionOptions& options);
  void set_region(const Region& region) override;

 private:
  Projected project(const at::Tensor& x,
                    const Rotation& rotation) const override;

  int64_t head_dim_;
  QkNorm qk_norm_;
  std::shared_ptr<Linear> q_;
  std::shared_ptr<Linear> k_;
  std::shared_ptr<Linear> v_;
  std::shared_ptr<Norm> q_norm_;
  std::shared_ptr<Norm> k_norm_;
};

}  // namespace tessera::nn
