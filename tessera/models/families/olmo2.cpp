// OLMo 2 (arXiv 2501.00656): Llama with norms behind attention and MLP, and
// one over all heads of q and one over those of k.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"blocks.*.attention_norm", "model.layers.*.post_attention_layernorm"},
    {"blocks.*.mlp_norm", "model.layers.*.post_feedforward_layernorm"},
};

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {});
  model.norm_eps = in.number("rms_norm_eps", 1e-5, 0, 1);
}

// What is not said is 1 to transformers, a token whose embedding would get no
// gradient there.
Json write(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  json["attention_bias"] = false;
  json["pad_token_id"] = nullptr;
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kOlmo2 = {.name = "olmo2",
                                        .architecture = "Olmo2ForCausalLM",
                                        .norms = NormPlaces::kBehind,
                                        .qk_norm = nn::QkNorm::kAllHeads,
                                        .hugging_face = &kForm};

}  // namespace tessera::models
