// What the families with experts have in common in their config.json.
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models::detail {

void read_experts(const Reader& in, const char* experts, int64_t top_k,
                  ModelConfig& model) {
  MoeConfig& moe = model.moe;
  moe.experts = in.size(experts);
  TS_CHECK_CONFIG(moe.experts <= kMaxExperts, in.place(experts), " is ",
                  moe.experts, "; it must be at most ", kMaxExperts, ".");
  moe.top_k = in.size("num_experts_per_tok", top_k);
  TS_CHECK_CONFIG(moe.top_k <= moe.experts, in.place("num_experts_per_tok"),
                  " is ", moe.top_k, "; it must be at most ", experts, ", ",
                  moe.experts, ".");
  moe.aux_loss = in.number("router_aux_loss_coef", 0.001);
  TS_CHECK_CONFIG(moe.aux_loss >= 0, in.place("router_aux_loss_coef"), " is ",
                  moe.aux_loss, "; it must not be negative.");
}

void require_said(const ModelConfig& model, const ExpertKeys& keys) {
  const MoeConfig& moe = model.moe;
  const auto require = [&](bool is_said, const char* key, const auto& value) {
    TS_CHECK_CONFIG(is_said, key, " is ", value,
                    ", which a Hugging Face folder of model.family ",
                    model.family, " cannot say.");
  };
  require(keys.layers || moe.every == 1, "model.moe.every", moe.every);
  require(keys.layers || keys.deepseeks || moe.first_dense == 0,
          "model.moe.first_dense", moe.first_dense);
  require(keys.ffn || moe.ffn == model.ffn, "model.moe.ffn", moe.ffn);
  require(moe.score == keys.score, "model.moe.score", moe.score);
  require(keys.normalize || moe.normalize, "model.moe.normalize",
          moe.normalize ? "true" : "false");
  require(keys.deepseeks || moe.scale == 1, "model.moe.scale", moe.scale);
  require(keys.deepseeks || moe.groups == 1, "model.moe.groups", moe.groups);
  require(keys.deepseeks || moe.shared_experts == 0, "model.moe.shared_experts",
          moe.shared_experts);
  require(keys.score_bias || !moe.bias_balance, "model.moe.bias_balance",
          "true");
  require(!moe.noise, "model.moe.noise", "true");
  require(!moe.experts_choose(), "model.moe.choice", moe.choice);
}

}  // namespace tessera::models::detail
