// The section model of the configuration: the sizes of a decoder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::models {

// Beyond these a configuration is taken for a mistake.
inline constexpr int64_t kMaxSize = 1 << 24;  // a width, a length, a vocabulary
inline constexpr int64_t kMaxLayers = 10000;
inline constexpr int64_t kMaxExperts = 1 << 14;
inline constexpr double kMostDropout = 0.99;

struct MoeConfig {
  int64_t experts = 0;  // 0: Mixtral's 8; of dense families none
  int64_t top_k = 2;
  int64_t every = 1;
  double capacity_factor = 0.0;  // 0: no token is dropped
  int64_t shared_experts = 0;
  double aux_loss = 0.01;
  bool bias_balance = false;
  void declare(config::Section& section);
  void complete(const std::string& family, int64_t layers);
};

// Adapters beside the linear layers of the blocks, which alone are trained.
struct LoraConfig {
  int64_t rank = 0;  // 0: none
  double alpha = 16.0;
  std::vector<std::string> targets = {};  // none: all
  std::string from = "";
  void declare(config::Section& section);
  double scale() const { return alpha / static_cast<double>(rank); }
};

// The defaults: a Llama-style decoder of about ten million parameters.
struct ModelConfig {
  std::string from = "";  // a folder with a model; "": the keys below
  bool load_weights = false;
  std::string family = "llama";
  int64_t layers = 6;
  int64_t hidden = 320;
  int64_t heads = 8;
  int64_t kv_heads = 0;  // 0: heads
  int64_t head_dim = 0;  // 0: hidden / heads
  int64_t ffn = 0;       // 0: the family's custom, see complete()
  int64_t vocab = 8192;
  int64_t max_seq = 1024;
  bool tie_embeddings = true;
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  double dropout = 0.0;
  MoeConfig moe = {};
  LoraConfig lora = {};
  void declare(config::Section& section);

  // Whether layer `index`, from 0, has experts. REQUIRES: complete().
  bool has_experts(int64_t index) const {
    return moe.experts > 0 && (index + 1) % moe.every == 0;
  }
  int64_t layers_with_experts() const {
    return moe.experts > 0 ? layers / moe.every : 0;
  }

  // Replaces the zeros that stand for a default: moe.experts, kv_heads,
  // head_dim, and ffn, which is 4 x hidden for gpt2 and 8/3 x hidden, rounded
  // up to a multiple of 64, for the others. TS_CHECK_CONFIG where heads do not
  // divide, or experts do not fit.
  void complete();
};

}  // namespace tessera::models
