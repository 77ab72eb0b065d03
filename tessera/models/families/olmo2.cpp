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
    {"embed.tokens", "model.embed_tokens"},
    {"blocks.*.attention.q", "model.layers.*.self_attn.q_proj"},
    {"blocks.*.attention.k", "model.layers.*.self_attn.k_proj"},
    {"blocks.*.attention.v", "model.layers.*.self_attn.v_proj"},
    {"blocks.*.attention.o", "model.layers.*.self_attn.o_proj"},
    {"blocks.*.attention.q_norm", "model.layers.*.self_attn.q_norm"},
    {"blocks.*.attention.k_norm", "model.layers.*.self_attn.k_norm"},
    {"blocks.*.attention_norm", "model.layers.*.post_attention_layernorm"},
    {"blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"},
    {"blocks.*.mlp.up", "model.layers.*.mlp.up_proj"},
    {"blocks.*.mlp.down", "model.layers.*.mlp.down_proj"},
    {"blocks.*.mlp_norm", "model.layers.*.post_feedforward_layernorm"},
    {"final_norm", "model.norm"},
    {"head", "lm_head"},
};

std::span<const TensorName> names() { return kNames; }

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {});
  model.norm_eps = in.number("rms_norm_eps", 1e-5, 0, 1);
}

Json write(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  json["attention_bias"] = false;
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
