// What tells one family of decoders from another, beyond the sizes in its
// ModelConfig. A new family is a file in families/ and a line in family.cpp.
#pragma once

#include <string>
#include <vector>

#include "tessera/nn/attention.h"

namespace tessera::models {

namespace detail {
struct HuggingFaceForm;
}  // namespace detail

// Where attention and MLP have their norms: norm(part(norm(x))) with both.
enum class NormPlaces { kBefore, kBehind, kBoth };
// Which layers may have model.window; a family's folders say as much.
enum class Windows { kNone, kAllLayers, kByLayer };

// What is left out is as in Llama.
struct Family {
  const char* name;                // as in `model.family`
  const char* architecture;        // as in config.json's `architectures`
  bool learned_positions = false;  // else rotary
  nn::NormKind norm = nn::NormKind::kRmsNorm;
  NormPlaces norms = NormPlaces::kBefore;
  bool scales_embedding = false;  // by the root of its width
  nn::MlpKind mlp = nn::MlpKind::kSwiGlu;
  bool qkv_bias = false;
  bool out_bias = false;  // of attention
  bool mlp_bias = false;
  nn::QkNorm qk_norm = nn::QkNorm::kNone;
  bool query_scalar = false;  // model.query_pre_attn_scalar
  Windows windows = Windows::kNone;
  bool local_theta = false;       // model.rope_theta_local
  bool latent_attention = false;  // keys and values of a narrow vector
  bool experts = false;           // in place of the MLP
  bool sigmoid_gate = false;      // of experts, else a softmax
  bool score_bias = false;        // of experts, whether or not it is moved
  bool predicts_ahead = false;    // model.mtp
  bool heads_fill_width = false;  // as many of keys as of queries
  const detail::HuggingFaceForm* hugging_face = nullptr;
};

// nullptr where there is none of that name.
const Family* find_family(const std::string& name);
// TS_CHECK_CONFIG on a family that is unknown or not built.
const Family& family_named(const std::string& name);
// In the order of the list in family.cpp.
std::vector<std::string> names_of_families();
// Of those whose layers can have experts: "mixtral, qwen3_moe".
std::string families_with_experts();
// The same of those that can have a window, and of those with such a fact.
std::string families_with_windows();
std::string families_with(bool Family::* fact);

}  // namespace tessera::models
