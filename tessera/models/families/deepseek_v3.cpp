// DeepSeek-V3 (arXiv 2412.19437): latent attention, experts in groups behind a
// sigmoid, balanced by a bias, with shared ones and first layers that are
// dense, and multi-token prediction, whose modules follow the layers as layers.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"blocks.*.attention.q_a", "model.layers.*.self_attn.q_a_proj"},
    {"blocks.*.attention.q_a_norm", "model.layers.*.self_attn.q_a_layernorm"},
    {"blocks.*.attention.q_b", "model.layers.*.self_attn.q_b_proj"},
    {"blocks.*.attention.kv_a", "model.layers.*.self_attn.kv_a_proj_with_mqa"},
    {"blocks.*.attention.kv_a_norm", "model.layers.*.self_attn.kv_a_layernorm"},
    {"blocks.*.attention.kv_b", "model.layers.*.self_attn.kv_b_proj"},
    {"blocks.*.moe.gate", "model.layers.*.mlp.gate"},
    {"blocks.*.moe.score_bias",
     "model.layers.*.mlp.gate.e_score_correction_bias"},
    {"blocks.*.moe.experts.*.gate", "model.layers.*.mlp.experts.*.gate_proj"},
    {"blocks.*.moe.experts.*.up", "model.layers.*.mlp.experts.*.up_proj"},
    {"blocks.*.moe.experts.*.down", "model.layers.*.mlp.experts.*.down_proj"},
    {"blocks.*.moe.shared.gate", "model.layers.*.mlp.shared_experts.gate_proj"},
    {"blocks.*.moe.shared.up", "model.layers.*.mlp.shared_experts.up_proj"},
    {"blocks.*.moe.shared.down", "model.layers.*.mlp.shared_experts.down_proj"},
    {"blocks.*.mtp.token_norm", "model.layers.*.enorm"},
    {"blocks.*.mtp.hidden_norm", "model.layers.*.hnorm"},
    {"blocks.*.mtp.proj", "model.layers.*.eh_proj"},
    {"blocks.*.mtp.norm", "model.layers.*.shared_head.norm"},
};
// That each module has for itself.
constexpr TensorName kCopies[] = {
    {"embed.tokens", "model.layers.*.embed_tokens"},
    {"head", "model.layers.*.shared_head.head"},
};

constexpr const char* kAuxLoss = "aux_loss_alpha";
constexpr const char* kAhead = "num_nextn_predict_layers";

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

// What is not said is as in DeepSeek-V3; null is none.
void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {});
  const int64_t rope = in.size("qk_rope_head_dim", 64);
  model.head_dim = in.size("qk_nope_head_dim", 128) + rope;
  model.latent = {
      .q_rank = in.is_null("q_lora_rank") ? 0 : in.size("q_lora_rank", 1536),
      .kv_rank = in.size("kv_lora_rank", 512),
      .rope_dim = rope,
      .value_dim = in.size("v_head_dim", 128)};
  in.refuse_unless(in.flag("rope_interleave", true), "rope_interleave");
  const char* experts =
      in.has("num_local_experts") ? "num_local_experts" : "n_routed_experts";
  detail::read_experts(in, experts, /*top_k=*/8, model);
  MoeConfig& moe = model.moe;
  moe.ffn = in.size("moe_intermediate_size", 2048);
  moe.first_dense = in.count("first_k_dense_replace", 3);
  in.refuse_unless(in.size("moe_layer_freq", 1) == 1, "moe_layer_freq");
  in.refuse_unless(in.word("scoring_func", "sigmoid") == "sigmoid",
                   "scoring_func");
  in.refuse_unless(in.word("topk_method", "noaux_tc") == "noaux_tc",
                   "topk_method");
  moe.score = "sigmoid";
  moe.normalize = in.flag("norm_topk_prob", true);
  moe.scale = in.number("routed_scaling_factor", 2.5, 0, 1e6);
  moe.groups = in.size("n_group", 8);
  moe.top_groups = in.size("topk_group", 4);
  moe.shared_experts =
      in.is_null("n_shared_experts") ? 0 : in.count("n_shared_experts", 1);
  moe.aux_loss = in.number(kAuxLoss, 0.0);
  TS_CHECK_CONFIG(moe.aux_loss >= 0, in.place(kAuxLoss), " is ", moe.aux_loss,
                  "; it must not be negative.");
  moe.bias_balance = true;
  model.mtp.layers = in.count(kAhead, 0);
  TS_CHECK_CONFIG(model.mtp.layers <= kMaxMtpLayers, in.place(kAhead), " is ",
                  model.mtp.layers, "; it must be at most ", kMaxMtpLayers,
                  ".");
}

Json write(const ModelConfig& model) {
  const MoeConfig& moe = model.moe;
  detail::require_said(model, {.ffn = true,
                               .normalize = true,
                               .deepseeks = true,
                               .score_bias = true,
                               .score = "sigmoid"});
  Json json = detail::llama_json(model);
  json.erase("head_dim");
  const LatentConfig& latent = model.latent;
  json.update(
      {{"attention_bias", false},
       {"q_lora_rank", latent.q_rank > 0 ? Json(latent.q_rank) : Json()},
       {"kv_lora_rank", latent.kv_rank},
       {"qk_rope_head_dim", latent.rope_dim},
       {"qk_nope_head_dim", model.head_dim - latent.rope_dim},
       {"v_head_dim", latent.value_dim},
       {"rope_interleave", true},
       {"n_routed_experts", moe.experts},
       {"num_experts_per_tok", moe.top_k},
       {"moe_intermediate_size", moe.ffn},
       {"first_k_dense_replace", moe.first_dense},
       {"moe_layer_freq", 1},
       {"scoring_func", "sigmoid"},
       {"topk_method", "noaux_tc"},
       {"norm_topk_prob", moe.normalize},
       {"routed_scaling_factor", moe.scale},
       {"n_group", moe.groups},
       {"topk_group", moe.top_groups},
       {"n_shared_experts", moe.shared_experts},
       {kAuxLoss, moe.aux_loss},
       {kAhead, model.mtp.layers}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {.names = names,
                                           .prefix = "model.",
                                           .read = read,
                                           .write = write,
                                           .aux_loss = kAuxLoss,
                                           .copies = kCopies,
                                           .ahead = kAhead};

}  // namespace

extern constinit const Family kDeepseekV3 = {
    .name = "deepseek_v3",
    .architecture = "DeepseekV3ForCausalLM",
    .latent_attention = true,
    .experts = true,
    .sigmoid_gate = true,
    .score_bias = true,
    .predicts_ahead = true,
    .hugging_face = &kForm};

}  // namespace tessera::models
