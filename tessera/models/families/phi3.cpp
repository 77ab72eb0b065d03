// Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905), of one architecture:
// Llama, in whose folders q, k and v are one tensor, and the MLP's gate and up.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr const char* kQkv = "model.layers.*.self_attn.qkv_proj";
constexpr const char* kGateUp = "model.layers.*.mlp.gate_up_proj";

std::vector<int64_t> gate_up_widths(const ModelConfig& model) {
  return {model.ffn, model.ffn};
}

constexpr TensorName kNames[] = {
    {"blocks.*.attention.q", kQkv, false, 0, detail::qkv_widths},
    {"blocks.*.attention.k", kQkv, false, 1, detail::qkv_widths},
    {"blocks.*.attention.v", kQkv, false, 2, detail::qkv_widths},
    {"blocks.*.mlp.gate", kGateUp, false, 0, gate_up_widths},
    {"blocks.*.mlp.up", kGateUp, false, 1, gate_up_widths},
};

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

// transformers takes any other type for longrope.
void refuse_scaling(const Reader& in) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!in.has(key) || !in.at(key).is_object()) continue;
    const Reader rope(in.at(key), in.place(key));
    const char* type_key = detail::rope_type_key(rope);
    const std::string type = rope.word(type_key, "default");
    TS_CHECK_CONFIG(type == "default", rope.place(type_key), " is \"", type,
                    "\", whose frequencies change with the length of the "
                    "sequence: that is not built. Phi-4 and models for 4k "
                    "tokens have none.");
  }
}

// A key of biases means nothing here.
void read(const Reader& in, ModelConfig& model) {
  refuse_scaling(in);
  detail::read_llama(in, model,
                     {.attention_bias = false, .window_switch = false});
  model.norm_eps = in.number("rms_norm_eps", 1e-5, 0, 1);
}

Json write(const ModelConfig& model) {
  TS_CHECK_CONFIG(model.rope_scaling.type == "none",
                  "model.rope_scaling.type is ", model.rope_scaling.type,
                  ", which a Hugging Face folder of model.family phi3 cannot "
                  "say.");
  Json json = detail::llama_json(model);
  json.update({{"original_max_position_embeddings", model.max_seq},
               {"partial_rotary_factor", 1.0},
               {"resid_pdrop", 0.0},
               {"embd_pdrop", 0.0},
               {"sliding_window", detail::window_json(model)},
               {"pad_token_id", nullptr}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kPhi3 = {.name = "phi3",
                                       .architecture = "Phi3ForCausalLM",
                                       .windows = Windows::kAllLayers,
                                       .hugging_face = &kForm};

}  // namespace tessera::models
