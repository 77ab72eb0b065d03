// The section model of the configuration: the sizes of a decoder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::models {

// Beyond these a configuration is taken for a mistake.
inline constexpr int64_t kMaxSize = 1 << 24;  // a width, a length, a vocabulary
inline constexpr int64_t kMaxLayers = 10000;
inline constexpr int64_t kMaxExperts = 1 << 14;
inline constexpr int64_t kMaxMtpLayers = 64;
inline constexpr double kMostDropout = 0.99;

struct MoeConfig {
  int64_t experts = 0;  // 0: the family's custom, 8; of dense families none
  int64_t top_k = 2;
  int64_t every = 1;
  int64_t first_dense = 0;
  int64_t ffn = 0;             // 0: ModelConfig::ffn
  std::string score = "auto";  // auto: the family's custom
  bool normalize = true;       // weights of a token's experts
  double scale = 1.0;          // of these weights
  int64_t groups = 1;
  int64_t top_groups = 1;
  double capacity_factor = 0.0;  // 0: no token is dropped
  int64_t shared_experts = 0;
  std::string choice = "tokens";
  bool noise = false;
  std::string balance = "sample";
  double aux_loss = 0.01;
  double z_loss = 0.0;
  bool bias_balance = false;
  double bias_rate = 0.001;
  void declare(config::Section& section);
  void complete(const std::string& family, int64_t layers);

  bool experts_choose() const { return choice == "experts"; }

 private:
  void check_groups() const;
  void check_choice(bool has_bias) const;
};

// Rotary positions of a model that was trained on shorter sequences.
struct RopeScalingConfig {
  std::string type = "none";
  double factor = 1.0;
  int64_t original_max_seq = 0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;
  double beta_fast = 32.0, beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 0.0;  // 0: what mscale and mscale_all_dim give
  double mscale = 0.0, mscale_all_dim = 0.0;
  void declare(config::Section& section);
  void check() const;
  // 0.1 m ln(factor) + 1 of YaRN, of such a weight m.
  double yarn_scale(double weight) const;
  bool operator==(const RopeScalingConfig&) const = default;
};

// Of latent attention; in the families that have it zeros stand for defaults.
struct LatentConfig {
  int64_t q_rank = 0;
  int64_t kv_rank = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
  void declare(config::Section& section);
  void complete(int64_t head_dim);
  // TS_CHECK_CONFIG of a family that has none.
  void refuse(const std::string& family) const;
};

// Multi-token prediction: so many modules behind the last layer, of which the
// k-th predicts the token k + 1 ahead (DeepSeek-V3, arXiv 2412.19437, section
// 2.2). They are trained beside the model, which does without them elsewhere.
struct MtpConfig {
  int64_t layers = 0;   // D
  double weight = 0.3;  // lambda: of the mean of their losses
  void declare(config::Section& section);
  // TS_CHECK_CONFIG of a family that has none.
  void refuse(const std::string& family) const;
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
  int64_t kv_heads = 0;               // 0: heads
  int64_t head_dim = 0;               // 0: hidden / heads
  int64_t query_pre_attn_scalar = 0;  // 0: head_dim
  int64_t ffn = 0;                    // 0: the family's custom, see complete()
  int64_t vocab = 8192;
  int64_t max_seq = 1024;
  bool tie_embeddings = true;
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  double rope_theta_local = 0.0;  // of layers with a window; 0: as the others
  RopeScalingConfig rope_scaling = {};
  int64_t window = 0;             // tokens that a token sees; 0: all before it
  int64_t window_every = 0;       // 0: all layers have the window
  int64_t window_first_full = 0;  // so many layers at the beginning have none
  LatentConfig latent = {};
  double dropout = 0.0;
  MoeConfig moe = {};
  MtpConfig mtp = {};
  LoraConfig lora = {};
  void declare(config::Section& section);

  // Behind the layers each module of multi-token prediction has a block, like
  // that of the last layer.
  int64_t num_blocks() const { return layers + mtp.layers; }

  // Whether block `index`, from 0, has experts. REQUIRES: complete().
  bool has_experts(int64_t index) const {
    const int64_t layer = std::min(index, layers - 1);
    return moe.experts > 0 && layer >= moe.first_dense &&
           (layer + 1) % moe.every == 0;
  }
  // Of the first `count` blocks.
  int64_t layers_with_experts(int64_t count) const {
    const int64_t more = std::max<int64_t>(0, count - layers);
    if (more > 0) {
      return layers_with_experts(layers) + (has_experts(layers) ? more : 0);
    }
    if (moe.experts == 0 || count <= moe.first_dense) return 0;
    return count / moe.every - moe.first_dense / moe.every;
  }
  int64_t layers_with_experts() const {
    return layers_with_experts(num_blocks());
  }

  // Of layer `index`, from 0: tokens that a token sees, itself the last of
  // them; 0: all before it.
  int64_t window_of(int64_t index) const {
    const bool is_full = index < window_first_full ||
                         (window_every > 0 && (index + 1) % window_every == 0);
    return is_full ? 0 : window;
  }

  bool has_windows() const;  // some layer
  // Layer `index` turns by rope_theta_local, which is not scaled.
  bool turns_locally(int64_t index) const {
    return rope_theta_local > 0 && window_of(index) > 0;
  }
  // By which queries are multiplied, beyond the 1 / sqrt(head_dim) of scores.
  double query_scale() const;

  // Experts have a bias on their scores, be it moved or not.
  bool has_score_bias() const;
  // Of a head: the features that positions turn, and the width of its values.
  int64_t rotary_dim() const {
    return latent.rope_dim > 0 ? latent.rope_dim : head_dim;
  }
  int64_t value_dim() const {
    return latent.value_dim > 0 ? latent.value_dim : head_dim;
  }

  // Replaces what stands for a default: moe.experts and score, kv_heads,
  // head_dim, ffn, which is 4 x hidden for gpt2 and 8/3 x hidden, rounded up to
  // a multiple of 64, for the others, and moe.ffn. TS_CHECK_CONFIG where heads
  // do not divide, or experts or windows do not fit.
  void complete();

 private:
  void check_window() const;
  void check_local_theta() const;
  void check_mtp() const;
  void check_countable() const;
  void complete_query_scalar();
};

}  // namespace tessera::models
