#include <iterator>
#include <vector>

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
  static const std::vector<TensorName> all = [] {
    const auto llamas = detail::llama_names();
    std::vector<TensorName> both(llamas.begin(), llamas.end());
    both.insert(both.end(), std::begin(kNames), std::end(kNames));
    return both;
  }();
  return all;
}

void read(const Reader& in, ModelConfig& model) {
  detail::read_llama(in, model, {.window_by_default = true});
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

Json write(const ModelConfig& model) {
  TS_CHECK_CONFIG(model.moe.every == 1, "model.moe.every is ", model.moe.every,
                  ": a Hugging Face folder of Mixtral has experts in every "
                  "layer.");
  Json json = detail::llama_json(model);
  json.update({{"num_local_experts", model.moe.experts},
               {"num_experts_per_tok", model.moe.top_k},
               {"router_aux_loss_coef", model.moe.aux_loss},
               {"router_jitter_noise", 0.0},
               {"output_router_logits", false},
               {"sliding_window", nullptr}});
  return json;
}

constexpr detail::HuggingFaceForm kForm = {names, "model.", read, write};

}  // namespace

extern constinit const Family kMixtral = {.name = "mixtral",
                                          .architecture = "MixtralForCausalLM",
                                          .experts = true,
                                          .hugging_face = &kForm};

}  // namespace tessera::models
