#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;
using detail::TensorName;

constexpr TensorName kNames[] = {
    {"blocks.*.moe.gate", "model.layers.*.block_sparse_moe.gate"},
    {"blocks.*.moe.experts.*.gate",
     "model.layers.*.block_sparse_moe.experts.*.w1"},
    {"blocks.*.moe.experts.*.down",
     "model.layers.*.block_sparse_moe.experts.*.w2"},
    {"blocks.*.moe.experts.*.up",
     "model.layers.*.block_sparse_moe.experts.*.w3"},
};

std::span<const TensorName> names() {
  static const auto all = detail::with_llama_names(kNames);
  return all;
}

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(
      in, model,
      {.window_switch = false, .default_theta = 1e6, .default_kv_heads = 8});
  model.norm_eps = in.number("rms_norm_eps", 1e-5, 0, 1);
  detail::read_experts(in, "num_local_experts", /*top_k=*/2, model);
  in.refuse_unless(in.number("router_jitter_noise", 0.0) == 0.0,
                   "router_jitter_noise");
}

Json write(const ModelConfig& model) {
  detail::require_said(model, {.ffn = true});
  Json json = detail::llama_json(model);
  json.update({{"intermediate_size", model.moe.ffn},  // every layer has some
               {"num_local_experts", model.moe.experts},
               {"num_experts_per_tok", model.moe.top_k},
               {"router_aux_loss_coef", model.moe.aux_loss},
               {"router_jitter_noise", 0.0},
               {"output_router_logits", false},
               {"sliding_window", detail::window_json(model)}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kMixtral = {.name = "mixtral",
                                          .architecture = "MixtralForCausalLM",
                                          .windows = Windows::kAllLayers,
                                          .experts = true,
                                          .hugging_face = &kForm};

}  // namespace tessera::models
