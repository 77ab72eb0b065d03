// Gemma 3's text models (arXiv 2503.19786): norms before and behind attention
// and MLP, whose weights are beside 1, GeGLU, an embedding that is scaled, and
// layers with a window and a rotary base of their own between those that see
// all.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::kFull;
using detail::kSliding;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"blocks.*.attention_norm_behind",
     "model.layers.*.post_attention_layernorm"},
    {"blocks.*.mlp_norm", "model.layers.*.pre_feedforward_layernorm"},
    {"blocks.*.mlp_norm_behind", "model.layers.*.post_feedforward_layernorm"},
};

constexpr const char* kActivation = "gelu_pytorch_tanh";

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

// Puts what `key` says over what `rope` says.
void put_over(const Reader& in, const char* key, Json& rope) {
  if (!in.has(key)) return;
  TS_CHECK_CONFIG(in.at(key).is_object(), in.place(key), " must be an object.");
  rope.update(in.at(key));
}

// Of layers of a kind: `base` is the key from before rope_parameters.
Json rotary_of(const Reader& in, const char* kind, const char* base,
               double theta) {
  constexpr const char* kKinds = "rope_parameters";
  Json rope = {{"rope_theta", in.number(base, theta)}};
  if (!in.has(kKinds)) return rope;
  const Reader kinds(in.at(kKinds), in.place(kKinds));
  in.refuse_unless(in.at(kKinds).is_object() && !kinds.has("rope_type"),
                   kKinds);
  put_over(kinds, kind, rope);
  return rope;
}

// transformers hears `truncate` beside the kinds alone: a kind that says
// otherwise is another model there.
bool truncate_of(const Reader& in, const Reader& full) {
  constexpr const char* kKinds = "rope_parameters";
  constexpr const char* kTruncate = "truncate";
  const bool is_heard =
      !in.has(kKinds) ||
      Reader(in.at(kKinds), in.place(kKinds)).flag(kTruncate, true);
  full.refuse_unless(full.flag(kTruncate, is_heard) == is_heard, kTruncate);
  return is_heard;
}

// Scaling is of the layers that see all, unless both say the same. The length
// before is that of `full`: one beside max_position_embeddings is not heard.
void read_rotary(const Reader& in, ModelConfig& model) {
  Json full = rotary_of(in, kFull, "rope_theta", 1e6);
  put_over(in, "rope_scaling", full);
  const Json local = rotary_of(in, kSliding, "rope_local_base_freq", 1e4);
  const Reader of_full(full, in.place(kFull));
  detail::read_rotary(of_full, of_full, model);
  model.rope_scaling.truncate = truncate_of(in, of_full);
  if (model.window == 0 || local == full) return;
  const Reader of_windows(local, in.place(kSliding));
  const char* type_key = detail::rope_type_key(of_windows);
  of_windows.refuse_unless(of_windows.word(type_key, "default") == "default",
                           type_key);
  of_windows.refuse_unless(
      of_windows.number("partial_rotary_factor", 1.0) == 1.0,
      "partial_rotary_factor");
  model.rope_theta_local = of_windows.number("rope_theta", 1e4, 1, 1e300);
}

void read(const Reader& in, ModelConfig& model) {
  constexpr detail::LlamaKeys kKeys = {.window_switch = false,
                                       .default_window = detail::kUsualWindow,
                                       .window_pattern = 6};
  detail::read_llama_sizes(in, model, kKeys);
  model.kv_heads = in.size("num_key_value_heads", 4);
  model.head_dim = in.size("head_dim", 256);
  model.query_pre_attn_scalar = in.size("query_pre_attn_scalar", 256);
  model.tie_embeddings = in.flag("tie_word_embeddings", true);
  in.refuse_unless(in.word("hidden_activation", kActivation) == kActivation,
                   "hidden_activation");
  for (const char* key :
       {"attn_logit_softcapping", "final_logit_softcapping"}) {
    in.refuse_unless(!in.has(key), key);
  }
  in.refuse_unless(!in.flag("use_bidirectional_attention", false),
                   "use_bidirectional_attention");
  detail::read_windows(in, kKeys, model);
  read_rotary(in, model);
}

// Readers from before layer_types go by the pattern alone. Without a window the
// key must be there all the same.
Json write(const ModelConfig& model) {
  Json json = detail::llama_json(model);
  json.erase("hidden_act");
  const bool has_window = model.window > 0;
  const int64_t all =
      model.window_every > 0 ? model.window_every : model.layers + 1;
  const Json full = detail::rotary_json(model);
  Json local = full;
  if (model.rope_theta_local > 0) {
    local = {{"rope_type", "default"}, {"rope_theta", model.rope_theta_local}};
  }
  Json kinds = {{kFull, full}, {kSliding, local}};
  if (!model.rope_scaling.truncate) kinds["truncate"] = false;
  json.update({{"hidden_activation", kActivation},
               {"attention_bias", false},
               {"query_pre_attn_scalar", model.query_pre_attn_scalar},
               {"attn_logit_softcapping", nullptr},
               {"final_logit_softcapping", nullptr},
               {"sliding_window", has_window ? model.window : model.max_seq},
               {"sliding_window_pattern", has_window ? all : 1},
               {"layer_types", detail::layer_types_json(model)},
               {"rope_local_base_freq", local["rope_theta"]},
               {"rope_parameters", kinds},
               {"pad_token_id", nullptr}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kGemma3 = {.name = "gemma3_text",
                                         .architecture = "Gemma3ForCausalLM",
                                         .norm = nn::NormKind::kRmsNormPlusOne,
                                         .norms = NormPlaces::kBoth,
                                         .scales_embedding = true,
                                         .mlp = nn::MlpKind::kGeGlu,
                                         .qk_norm = nn::QkNorm::kPerHead,
                                         .query_scalar = true,
                                         .windows = Windows::kByLayer,
                                         .local_theta = true,
                                         .hugging_face = &kForm};

}  // namespace tessera::models
