#include "tessera/models/hugging_face_config.h"

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;

constexpr uint64_t kMaxBytes = uint64_t{1} << 20;  // of a config.json

// Typed reads of one JSON object; a null counts as absent.
class Reader {
 public:
  Reader(const Json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const {
    return object_.contains(key) && !object_[key].is_null();
  }
  const Json& at(const char* key) const { return object_[key]; }
  std::string place(const char* key) const { return where_ + ": " + key; }

  int64_t size(const char* key) const {
    TS_CHECK_CONFIG(has(key), where_, ": \"", key, "\" is missing.");
    return size(key, 0);
  }
  int64_t size(const char* key, int64_t fallback) const {
    if (!has(key)) return fallback;
    const int64_t value = detail::as_int(object_[key], place(key));
    TS_CHECK_CONFIG(value > 0 && value <= kMaxSize, place(key), " is ", value,
                    "; it must be above 0 and at most ", kMaxSize, ".");
    return value;
  }
  int64_t layers(const char* key) const {
    const int64_t value = size(key);
    TS_CHECK_CONFIG(value <= kMaxLayers, place(key), " is ", value,
                    "; it must be at most ", kMaxLayers, ".");
    return value;
  }
  double number(const char* key, double fallback) const {
    return has(key) ? detail::as_double(object_[key], place(key)) : fallback;
  }
  // Above `above`, and at most `most`.
  double number(const char* key, double fallback, double above,
                double most) const {
    const double value = number(key, fallback);
    TS_CHECK_CONFIG(value > above && value <= most, place(key), " is ", value,
                    "; it must be above ", above, " and at most ", most, ".");
    return value;
  }
  bool flag(const char* key, bool fallback) const {
    return has(key) ? detail::as_bool(object_[key], place(key)) : fallback;
  }
  std::string word(const char* key, const std::string& fallback) const {
    return has(key) ? detail::as_string(object_[key], place(key)) : fallback;
  }
  void refuse_unless(bool supported, const char* key) const {
    TS_CHECK_CONFIG(supported, place(key), " is ",
                    has(key) ? object_[key].dump() : "absent",
                    ", which is not supported.");
  }

 private:
  const Json& object_;
  std::string where_;
};

void read_gpt2(const Reader& in, ModelConfig& model) {
  model.layers = in.layers("n_layer");
  model.hidden = in.size("n_embd");
  model.heads = in.size("n_head");
  model.ffn = in.size("n_inner", 4 * model.hidden);
  model.max_seq = in.size("n_positions");
  model.norm_eps = in.number("layer_norm_epsilon", 1e-5, 0, 1);
  model.tie_embeddings = in.flag("tie_word_embeddings", true);
  const auto activation = in.word("activation_function", "gelu_new");
  in.refuse_unless(
      activation == "gelu_new" || activation == "gelu_pytorch_tanh",
      "activation_function");
  in.refuse_unless(in.flag("scale_attn_weights", true), "scale_attn_weights");
  for (const char* key :
       {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    in.refuse_unless(!in.flag(key, false), key);
  }
}

void read_rotary(const Reader& in, ModelConfig& model) {
  model.rope_theta = in.number("rope_theta", 10000.0, 1, 1e300);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!in.has(key)) continue;
    const Reader rope(in.at(key), in.place(key));
    TS_CHECK_CONFIG(in.at(key).is_object(), in.place(key),
                    " must be an object.");
    for (const char* type : {"rope_type", "type"}) {
      rope.refuse_unless(rope.word(type, "default") == "default", type);
    }
    for (const auto& item : in.at(key).items()) {  // one of each kind of layer
      rope.refuse_unless(!item.value().is_object(), item.key().c_str());
    }
    rope.refuse_unless(rope.number("partial_rotary_factor", 1.0) == 1.0,
                       "partial_rotary_factor");
    model.rope_theta = rope.number("rope_theta", model.rope_theta, 1, 1e300);
  }
  in.refuse_unless(in.number("partial_rotary_factor", 1.0) == 1.0,
                   "partial_rotary_factor");
}

// Where there is no switch for it, a window that is given is used.
void refuse_sliding_window(const Reader& in, const ModelConfig& model) {
  if (in.flag("use_sliding_window", model.family == "mixtral")) {
    in.refuse_unless(in.size("sliding_window", model.max_seq) >= model.max_seq,
                     "sliding_window");
  }
  if (!in.has("layer_types")) return;
  for (const auto& type : in.at("layer_types")) {
    in.refuse_unless(type == "full_attention", "layer_types");
  }
}

void read_llama(const Reader& in, ModelConfig& model) {
  model.layers = in.layers("num_hidden_layers");
  model.hidden = in.size("hidden_size");
  model.heads = in.size("num_attention_heads");
  model.kv_heads = in.size("num_key_value_heads", 0);
  model.head_dim = in.size("head_dim", 0);
  model.ffn = in.size("intermediate_size");
  model.max_seq = in.size("max_position_embeddings");
  model.norm_eps = in.number("rms_norm_eps", 1e-6, 0, 1);
  model.tie_embeddings = in.flag("tie_word_embeddings", false);
  in.refuse_unless(in.word("hidden_act", "silu") == "silu", "hidden_act");
  // Qwen2 has its biases whatever this key says.
  if (model.family != "qwen2") {
    in.refuse_unless(!in.flag("attention_bias", false), "attention_bias");
  }
  in.refuse_unless(!in.flag("mlp_bias", false), "mlp_bias");
  read_rotary(in, model);
  refuse_sliding_window(in, model);
}

void read_mixtral(const Reader& in, ModelConfig& model) {
  read_llama(in, model);
  model.moe.experts = in.size("num_local_experts");
  TS_CHECK_CONFIG(model.moe.experts <= kMaxExperts,
                  in.place("num_local_experts"), " is ", model.moe.experts,
                  "; it must be at most ", kMaxExperts, ".");
  model.moe.top_k = in.size("num_experts_per_tok", 2);
  TS_CHECK_CONFIG(model.moe.top_k <= model.moe.experts,
                  in.place("num_experts_per_tok"), " is ", model.moe.top_k,
                  "; it must be at most num_local_experts, ", model.moe.experts,
                  ".");
  model.moe.aux_loss = in.number("router_aux_loss_coef", 0.001);
  TS_CHECK_CONFIG(model.moe.aux_loss >= 0, in.place("router_aux_loss_coef"),
                  " is ", model.moe.aux_loss, "; it must not be negative.");
  in.refuse_unless(in.number("router_jitter_noise", 0.0) == 0.0,
                   "router_jitter_noise");
}

at::ScalarType read_dtype(const Reader& in) {
  const char* key = in.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = in.word(key, "float32");
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  if (name == "float64") return at::kDouble;
  TS_CHECK_CONFIG(false, in.place(key), " is \"", name,
                  "\"; known: float64, float32, bfloat16, float16.");
}

void read_tokens(const Reader& in, HuggingFaceConfig& config) {
  if (in.has("bos_token_id")) {
    config.bos_token =
        detail::as_int(in.at("bos_token_id"), in.place("bos_token_id"));
  }
  if (!in.has("eos_token_id")) return;
  const Json& eos = in.at("eos_token_id");
  for (const auto& id : eos.is_array() ? eos : Json::array({eos})) {
    config.eos_tokens.push_back(detail::as_int(id, in.place("eos_token_id")));
  }
}

void warn_of_dropout(const Reader& in) {
  for (const char* key :
       {"resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"}) {
    if (in.number(key, 0.0) == 0.0) continue;
    log::warning(in.place(key), " is ", in.number(key, 0.0),
                 "; training goes without dropout, which is not built.");
  }
}

const char* dtype_word(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      return "float32";
  }
}

Json gpt2_json(const ModelConfig& model) {
  return {{"n_layer", model.layers},
          {"n_embd", model.hidden},
          {"n_head", model.heads},
          {"n_inner", model.ffn},
          {"n_positions", model.max_seq},
          {"n_ctx", model.max_seq},
          {"layer_norm_epsilon", model.norm_eps},
          {"activation_function", "gelu_new"},
          {"resid_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0}};
}

Json llama_json(const ModelConfig& model) {
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
               {"rope_parameters",
                {{"rope_theta", model.rope_theta}, {"rope_type", "default"}}}};
  if (model.family == "qwen2" || model.family == "qwen3") {
    json["use_sliding_window"] = false;
  } else if (model.family == "llama") {
    json["mlp_bias"] = false;
  }
  if (model.family == "llama" || model.family == "qwen3") {
    json["attention_bias"] = false;
  }
  return json;
}

Json mixtral_json(const ModelConfig& model) {
  TS_CHECK_CONFIG(model.moe.every == 1, "model.moe.every is ", model.moe.every,
                  ": a Hugging Face folder of Mixtral has experts in every "
                  "layer.");
  Json json = llama_json(model);
  json.update({{"num_local_experts", model.moe.experts},
               {"num_experts_per_tok", model.moe.top_k},
               {"router_aux_loss_coef", model.moe.aux_loss},
               {"router_jitter_noise", 0.0},
               {"output_router_logits", false},
               {"sliding_window", nullptr}});
  return json;
}

Json family_json(const ModelConfig& model) {
  if (model.family == "gpt2") return gpt2_json(model);
  if (model.family == "mixtral") return mixtral_json(model);
  return llama_json(model);
}

void put_tokens(const HuggingFaceConfig& config, Json& json) {
  if (config.bos_token) json["bos_token_id"] = *config.bos_token;
  if (config.eos_tokens.size() == 1) {
    json["eos_token_id"] = config.eos_tokens[0];
  } else if (!config.eos_tokens.empty()) {
    json["eos_token_id"] = config.eos_tokens;
  }
}

}  // namespace

HuggingFaceConfig parse_hugging_face_config(const std::string& text,
                                            const std::string& source) {
  const Json json = detail::parse_json(text, source);
  TS_CHECK_CONFIG(json.is_object(), source, ": must be a JSON object.");
  const Reader in(json, source);
  TS_CHECK_CONFIG(in.has("model_type"), source, ": \"model_type\" is missing.");
  HuggingFaceConfig config;
  config.model.family = in.word("model_type", "");
  const Family* family = find_family(config.model.family);
  TS_CHECK_CONFIG(family != nullptr, in.place("model_type"), " is \"",
                  config.model.family, "\". Supported: ", names_of_families(),
                  ".");
  in.refuse_unless(!in.has("quantization_config"), "quantization_config");
  config.model.vocab = in.size("vocab_size");
  const auto read = family->learned_positions ? read_gpt2
                    : family->experts         ? read_mixtral
                                              : read_llama;
  read(in, config.model);
  config.model.complete();
  config.dtype = read_dtype(in);
  read_tokens(in, config);
  warn_of_dropout(in);
  return config;
}

HuggingFaceConfig read_hugging_face_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  return parse_hugging_face_config(read_file(path, kMaxBytes), path);
}

std::string hugging_face_config_json(const HuggingFaceConfig& config) {
  const Family& family = family_named(config.model.family);
  Json json = {{"architectures", Json::array({family.architecture})},
               {"model_type", family.name},
               {"vocab_size", config.model.vocab},
               {"tie_word_embeddings", config.model.tie_embeddings},
               {"use_cache", true},
               {"initializer_range", 0.02},
               {"torch_dtype", dtype_word(config.dtype)},
               {"dtype", dtype_word(config.dtype)}};
  json.update(family_json(config.model));
  put_tokens(config, json);
  return json.dump(2) + "\n";
}

std::string generation_config_json(const HuggingFaceConfig& config) {
  Json json = {{"_from_model_config", true}};
  put_tokens(config, json);
  return json.dump(2) + "\n";
}

}  // namespace tessera::models
