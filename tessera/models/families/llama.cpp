#include <algorithm>
#include <iterator>
#include <vector>

#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::kFull;
using detail::kSliding;
using detail::LlamaKeys;
using detail::Reader;
using detail::TensorName;

// Also of Mistral, Qwen2 and Qwen3, and of Mixtral beside its experts.
constexpr TensorName kNames[] = {
    {"embed.tokens", "model.embed_tokens"},
    {"blocks.*.attention_norm", "model.layers.*.input_layernorm"},
    {"blocks.*.attention.q", "model.layers.*.self_attn.q_proj"},
    {"blocks.*.attention.k", "model.layers.*.self_attn.k_proj"},
    {"blocks.*.attention.v", "model.layers.*.self_attn.v_proj"},
    {"blocks.*.attention.o", "model.layers.*.self_attn.o_proj"},
    {"blocks.*.attention.q_norm", "model.layers.*.self_attn.q_norm"},
    {"blocks.*.attention.k_norm", "model.layers.*.self_attn.k_norm"},
    {"blocks.*.mlp_norm", "model.layers.*.post_attention_layernorm"},
    {"blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"},
    {"blocks.*.mlp.up", "model.layers.*.mlp.up_proj"},
    {"blocks.*.mlp.down", "model.layers.*.mlp.down_proj"},
    {"final_norm", "model.norm"},
    {"head", "lm_head"},
};

void read_scaling(const Reader& in, const Reader& rope, ModelConfig& model) {
  RopeScalingConfig& scaling = model.rope_scaling;
  const char* type_key = detail::rope_type_key(rope);
  const std::string type = rope.word(type_key, "default");
  scaling.type = type == "default" ? "none" : type;
  rope.refuse_unless(scaling.type == "none" || type == "linear" ||
                         type == "llama3" || type == "yarn",
                     type_key);
  if (scaling.type == "none") return;
  constexpr double kMost = 1e6;
  const auto number = [&](const char* key, double& member) {
    if (rope.has(key)) member = rope.number(key, member, 0, kMost);
  };
  number("low_freq_factor", scaling.low_freq_factor);
  number("high_freq_factor", scaling.high_freq_factor);
  number("beta_fast", scaling.beta_fast);
  number("beta_slow", scaling.beta_slow);
  number("attention_factor", scaling.attention_factor);
  for (const auto& [key, member] :
       {std::pair{"mscale", &scaling.mscale},
        {"mscale_all_dim", &scaling.mscale_all_dim}}) {
    *member = rope.number(key, 0.0);
    TS_CHECK_CONFIG(*member >= 0 && *member <= kMost, rope.place(key), " is ",
                    *member, "; it must be at least 0 and at most ", kMost,
                    ".");
  }
  scaling.truncate = rope.flag("truncate", true);
  constexpr const char* kLength = "original_max_position_embeddings";
  scaling.original_max_seq =
      in.size(kLength, rope.size(kLength, model.max_seq));
  if (rope.has("factor") || type != "yarn") {
    scaling.factor = rope.number("factor", 0.0, 0, kMost);
  } else {
    scaling.factor = static_cast<double>(model.max_seq) /
                     static_cast<double>(scaling.original_max_seq);
  }
  TS_CHECK_CONFIG(scaling.factor >= 1, rope.place("factor"), " is ",
                  scaling.factor, "; it must be at least 1.");
}

// Where both keys are there the older one counts, as in transformers.
void read_rotary_of_all(const Reader& in, const LlamaKeys& keys,
                        ModelConfig& model) {
  model.rope_theta = in.number("rope_theta", keys.default_theta, 1, 1e300);
  const bool has_old = in.has("rope_scaling") && !in.at("rope_scaling").empty();
  const char* key = has_old ? "rope_scaling" : "rope_parameters";
  if (in.has(key)) {
    const Reader rope(in.at(key), in.place(key));
    TS_CHECK_CONFIG(in.at(key).is_object(), in.place(key),
                    " must be an object.");
    for (const auto& item : in.at(key).items()) {  // one of each kind of layer
      rope.refuse_unless(!item.value().is_object(), item.key().c_str());
    }
    detail::read_rotary(in, rope, model);
  }
  in.refuse_unless(in.number("partial_rotary_factor", 1.0) == 1.0,
                   "partial_rotary_factor");
}

// Of each layer, whether it has the window, where the folder lists them.
std::vector<bool> listed_windows(const Reader& in, const ModelConfig& model) {
  std::vector<bool> has_window;
  if (!in.has("layer_types")) return has_window;
  for (const auto& type : in.at("layer_types")) {
    in.refuse_unless(type == kFull || type == kSliding, "layer_types");
    has_window.push_back(type == kSliding);
  }
  in.refuse_unless(std::ssize(has_window) == model.layers, "layer_types");
  return has_window;
}

// The pattern of window_every and window_first_full that gives these layers a
// window, in `model`; false: none does.
bool find_pattern(const std::vector<bool>& has_window, ModelConfig& model) {
  const auto is_found = [&] {
    for (int64_t i = 0; i < model.layers; ++i) {
      if ((model.window_of(i) > 0) != has_window[i]) return false;
    }
    return true;
  };
  const auto first = std::ranges::find(has_window, true);
  for (const int64_t full : {int64_t{0}, first - has_window.begin()}) {
    model.window_first_full = full;
    for (int64_t every = 0; every <= model.layers; ++every) {
      model.window_every = every;
      if (is_found()) return true;
    }
  }
  return false;
}

// As read_windows() reads them, of a family with layers of both kinds.
void put_windows(const ModelConfig& model, Json& json) {
  json["use_sliding_window"] = model.window > 0;
  if (model.window == 0) return;
  json.update({{"sliding_window", model.window},
               {"max_window_layers", model.window_first_full},
               {"layer_types", detail::layer_types_json(model)}});
}

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {});
}

// Its biases are there whatever the key says.
void read_qwen2(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model,
                     {.attention_bias = false,
                      .default_window = detail::kUsualWindow,
                      .default_kv_heads = 32});
}

void read_qwen3(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model,
                     {.default_window = detail::kUsualWindow,
                      .default_kv_heads = 32,
                      .default_head_dim = 128});
}

void read_mistral(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model,
                     {.window_switch = false,
                      .default_window = detail::kUsualWindow,
                      .default_kv_heads = 8});
}

Json write(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  json["mlp_bias"] = false;
  json["attention_bias"] = false;
  return json;
}

Json write_qwen2(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  put_windows(model, json);
  return json;
}

Json write_qwen3(const ModelConfig& model) {
  Json json = write_qwen2(model);
  json["attention_bias"] = false;
  return json;
}

Json write_mistral(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  json["sliding_window"] = detail::window_json(model);
  return json;
}

constexpr detail::HuggingFaceForm kForm = {detail::llama_names, "model.", read,
                                           write};
constexpr detail::HuggingFaceForm kQwen2Form = {detail::llama_names, "model.",
                                                read_qwen2, write_qwen2};
constexpr detail::HuggingFaceForm kQwen3Form = {detail::llama_names, "model.",
                                                read_qwen3, write_qwen3};
constexpr detail::HuggingFaceForm kMistralForm = {detail::llama_names, "model.",
                                                  read_mistral, write_mistral};

}  // namespace

namespace detail {

std::span<const TensorName> llama_names() { return kNames; }

std::vector<TensorName> with_llama_names(std::span<const TensorName> more) {
  std::vector<TensorName> all(more.begin(), more.end());
  all.insert(all.end(), std::begin(kNames), std::end(kNames));
  return all;
}

std::vector<int64_t> qkv_widths(const ModelConfig& model) {
  const int64_t q = model.heads * model.head_dim;
  const int64_t kv = model.kv_heads * model.head_dim;
  return {q, kv, kv};
}

void read_llama_sizes(const Reader& in, ModelConfig& model,
                      const LlamaKeys& keys) {
  model.layers = in.layers("num_hidden_layers");
  model.hidden = in.size("hidden_size");
  model.heads = in.size("num_attention_heads");
  const auto size_or = [&](const char* key, int64_t absent) {
    return in.size(key, in.is_null(key) ? 0 : absent);
  };
  model.kv_heads = size_or("num_key_value_heads", keys.default_kv_heads);
  model.head_dim = size_or("head_dim", keys.default_head_dim);
  model.ffn = in.size("intermediate_size");
  model.max_seq = in.size("max_position_embeddings");
  model.norm_eps = in.number("rms_norm_eps", 1e-6, 0, 1);
  model.tie_embeddings = in.flag("tie_word_embeddings", false);
  if (keys.attention_bias) {
    in.refuse_unless(!in.flag("attention_bias", false), "attention_bias");
  }
}

// The layers that have the window: as they are listed, or behind so many.
void read_windows(const Reader& in, const LlamaKeys& keys, ModelConfig& model) {
  constexpr int64_t kQwensFullLayers = 28;
  const bool is_used =
      !keys.window_switch || in.flag("use_sliding_window", false);
  model.window = is_used && !in.is_null("sliding_window")
                     ? in.size("sliding_window", keys.default_window)
                     : 0;
  const Windows windows = family_named(model.family).windows;
  if (windows == Windows::kNone) {  // but one in which all fits
    in.refuse_unless(model.window == 0 || model.window >= model.max_seq,
                     "sliding_window");
    model.window = 0;
  }
  const auto listed = listed_windows(in, model);
  const bool is_one = std::ranges::find(listed, true) != listed.end();
  if (!listed.empty()) {
    in.refuse_unless(!is_one || model.window > 0, "layer_types");
    in.refuse_unless(
        windows == Windows::kByLayer
            ? find_pattern(listed, model)
            : std::ranges::count(listed, model.window > 0) == model.layers,
        "layer_types");
  } else if (keys.window_pattern > 0) {
    model.window_every = in.size("sliding_window_pattern", keys.window_pattern);
  } else if (windows == Windows::kByLayer) {
    model.window_first_full = in.count("max_window_layers", kQwensFullLayers);
  }
  if (model.has_windows()) return;
  model.window = model.window_every = model.window_first_full = 0;
}

Json layer_types_json(const ModelConfig& model) {
  Json types = Json::array();
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    types.push_back(model.window_of(layer) > 0 ? kSliding : kFull);
  }
  return types;
}

void read_rotary(const Reader& in, const Reader& rope, ModelConfig& model) {
  read_scaling(in, rope, model);
  rope.refuse_unless(rope.number("partial_rotary_factor", 1.0) == 1.0,
                     "partial_rotary_factor");
  model.rope_theta = rope.number("rope_theta", model.rope_theta, 1, 1e300);
}

void read_llama(const Reader& in, ModelConfig& model, const LlamaKeys& keys) {
  read_llama_sizes(in, model, keys);
  in.refuse_unless(in.word("hidden_act", "silu") == "silu", "hidden_act");
  in.refuse_unless(!in.flag("mlp_bias", false), "mlp_bias");
  read_rotary_of_all(in, keys, model);
  read_windows(in, keys, model);
}

Json rotary_json(const ModelConfig& model) {
  const RopeScalingConfig& scaling = model.rope_scaling;
  Json rope = {{"rope_theta", model.rope_theta}};
  if (scaling.type == "none") {
    rope["rope_type"] = "default";
    return rope;
  }
  rope.update({{"rope_type", scaling.type}, {"factor", scaling.factor}});
  for (const auto& [key, value] :
       {std::pair{"mscale", scaling.mscale},
        {"mscale_all_dim", scaling.mscale_all_dim}}) {
    if (value > 0) rope[key] = value;
  }
  if (scaling.type == "linear") return rope;
  rope["original_max_position_embeddings"] = scaling.original_max_seq;
  if (scaling.type == "llama3") {
    rope["low_freq_factor"] = scaling.low_freq_factor;
    rope["high_freq_factor"] = scaling.high_freq_factor;
    return rope;
  }
  rope.update({{"beta_fast", scaling.beta_fast},
               {"beta_slow", scaling.beta_slow},
               {"truncate", scaling.truncate}});
  if (scaling.attention_factor > 0) {
    rope["attention_factor"] = scaling.attention_factor;
  }
  return rope;
}

Json llama_json(const ModelConfig& model) {
  const Json rope = rotary_json(model);
  Json json = {{"num_hidden_layers", model.layers},
               {"hidden_size", model.hidden},
               {"num_attention_heads", model.heads},
               {"num_key_value_heads", model.kv_heads},
               {"head_dim", model.head_dim},
               {"intermediate_size", model.ffn},
               {"max_position_embeddings", model.max_seq},
               {"rms_norm_eps", model.norm_eps},
               {"hidden_act", "silu"},
               {"attention_dropout", 0.0},
               {"rope_theta", model.rope_theta},
               {"rope_parameters", rope}};
  // Where older readers look for it.
  if (model.rope_scaling.type != "none") json["rope_scaling"] = rope;
  return json;
}

Json window_json(const ModelConfig& model) {
  return model.window > 0 ? Json(model.window) : Json();
}

}  // namespace detail

extern constinit const Family kLlama = {.name = "llama",
                                        .architecture = "LlamaForCausalLM",
                                        .hugging_face = &kForm};

extern constinit const Family kQwen2 = {.name = "qwen2",
                                        .architecture = "Qwen2ForCausalLM",
                                        .qkv_bias = true,
                                        .windows = Windows::kByLayer,
                                        .hugging_face = &kQwen2Form};

extern constinit const Family kQwen3 = {.name = "qwen3",
                                        .architecture = "Qwen3ForCausalLM",
                                        .qk_norm = nn::QkNorm::kPerHead,
                                        .windows = Windows::kByLayer,
                                        .hugging_face = &kQwen3Form};

extern constinit const Family kMistral = {.name = "mistral",
                                          .architecture = "MistralForCausalLM",
                                          .windows = Windows::kAllLayers,
                                          .hugging_face = &kMistralForm};

}  // namespace tessera::models
