#include "tessera/models/family.h"

#include <array>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

using nn::MlpKind;
using nn::NormKind;

constexpr std::array kFamilies = {
    Family{.name = "gpt2",
           .architecture = "GPT2LMHeadModel",
           .learned_positions = true,
           .norm = NormKind::kLayerNorm,
           .mlp = MlpKind::kGelu,
           .qkv_bias = true,
           .out_bias = true,
           .mlp_bias = true,
           .qk_norm = false},
    Family{.name = "llama",
           .architecture = "LlamaForCausalLM",
           .learned_positions = false,
           .norm = NormKind::kRmsNorm,
           .mlp = MlpKind::kSwiGlu,
           .qkv_bias = false,
           .out_bias = false,
           .mlp_bias = false,
           .qk_norm = false},
    Family{.name = "qwen2",
           .architecture = "Qwen2ForCausalLM",
           .learned_positions = false,
           .norm = NormKind::kRmsNorm,
           .mlp = MlpKind::kSwiGlu,
           .qkv_bias = true,
           .out_bias = false,
           .mlp_bias = false,
           .qk_norm = false},
    Family{.name = "qwen3",
           .architecture = "Qwen3ForCausalLM",
           .learned_positions = false,
           .norm = NormKind::kRmsNorm,
           .mlp = MlpKind::kSwiGlu,
           .qkv_bias = false,
           .out_bias = false,
           .mlp_bias = false,
           .qk_norm = true},
    Family{.name = "mixtral",
           .architecture = "MixtralForCausalLM",
           .learned_positions = false,
           .norm = NormKind::kRmsNorm,
           .mlp = MlpKind::kSwiGlu,
           .qkv_bias = false,
           .out_bias = false,
           .mlp_bias = false,
           .qk_norm = false,
           .experts = true},
};

}  // namespace

const Family* find_family(const std::string& name) {
  for (const auto& family : kFamilies) {
    if (name == family.name) return &family;
  }
  return nullptr;
}

const Family& family_named(const std::string& name) {
  const Family* family = find_family(name);
  TS_CHECK_CONFIG(family != nullptr, "model.family: \"", name,
                  "\" is not built. Known: ", names_of_families(), ".");
  return *family;
}

std::string names_of_families() {
  std::string names;
  for (const auto& family : kFamilies) {
    names += (names.empty() ? "" : ", ") + std::string(family.name);
  }
  return names;
}

}  // namespace tessera::models
