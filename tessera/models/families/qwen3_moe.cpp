// Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts, whose weights need not add
// up to 1.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"blocks.*.moe.gate", "model.layers.*.mlp.gate"},
    {"blocks.*.moe.experts.*.gate", "model.layers.*.mlp.experts.*.gate_proj"},
    {"blocks.*.moe.experts.*.up", "model.layers.*.mlp.experts.*.up_proj"},
    {"blocks.*.moe.experts.*.down", "model.layers.*.mlp.experts.*.down_proj"},
};

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

// Layers that have no experts beside those that decoder_sparse_step leaves out:
// here the first ones alone.
int64_t read_first_dense(const Reader& in) {
  if (!in.has("mlp_only_layers")) return 0;
  int64_t count = 0;
  for (const auto& layer : in.at("mlp_only_layers")) {
    in.refuse_unless(layer == count, "mlp_only_layers");
    ++count;
  }
  return count;
}

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {.default_window = detail::kUsualWindow});
  model.kv_heads = in.size("num_key_value_heads", 4);
  const char* experts =
      in.has("num_local_experts") ? "num_local_experts" : "num_experts";
  detail::read_experts(in, experts, /*top_k=*/8, model);
  model.moe.ffn = in.size("moe_intermediate_size");
  model.moe.every = in.size("decoder_sparse_step", 1);
  model.moe.first_dense = read_first_dense(in);
  model.moe.normalize = in.flag("norm_topk_prob", false);
}

Json write(const ModelConfig& model) {
  const MoeConfig& moe = model.moe;
  detail::require_said(model, {.layers = true, .ffn = true, .normalize = true});
  Json json = detail::llama_json(model);
  Json dense = Json::array();
  for (int64_t layer = 0; layer < moe.first_dense; ++layer) {
    dense.push_back(layer);
  }
  json.update({{"attention_bias", false},
               {"use_sliding_window", model.window > 0},
               {"sliding_window", detail::window_json(model)},
               {"num_experts", moe.experts},
               {"num_experts_per_tok", moe.top_k},
               {"moe_intermediate_size", moe.ffn},
               {"decoder_sparse_step", moe.every},
               {"mlp_only_layers", dense},
               {"norm_topk_prob", moe.normalize},
               {"router_aux_loss_coef", moe.aux_loss},
               {"output_router_logits", false}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kQwen3Moe = {
    .name = "qwen3_moe",
    .architecture = "Qwen3MoeForCausalLM",
    .qk_norm = nn::QkNorm::kPerHead,
    .windows = Windows::kAllLayers,
    .experts = true,
    .hugging_face = &kForm};

}  // namespace tessera::models
