#include "tessera/models/model_config.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

double real_of(int64_t size) { return static_cast<double>(size); }

// Elements of the matrices of a block's attention.
double attention_elements(const ModelConfig& of) {
  const double hidden = real_of(of.hidden), heads = real_of(of.heads);
  const double width = real_of(of.head_dim), value = real_of(of.value_dim());
  const double out = hidden * heads * value;
  const LatentConfig& latent = of.latent;
  if (latent.rope_dim == 0) {
    return hidden * width * (heads + 2 * real_of(of.kv_heads)) + out;
  }
  const double rope = real_of(latent.rope_dim);
  const double q_rank = real_of(latent.q_rank);
  const double kv_rank = real_of(latent.kv_rank);
  const double q =
      q_rank > 0 ? q_rank * (hidden + heads * width) : hidden * heads * width;
  return q + hidden * (kv_rank + rope) +
         kv_rank * heads * (width - rope + value) + out;
}

// Of those of the whole model, without norms and biases.
double elements_of(const ModelConfig& of, const Family& family) {
  const double hidden = real_of(of.hidden);
  const double with_experts = real_of(of.layers_with_experts());
  const double dense = real_of(of.num_blocks()) - with_experts;
  const double mlp =
      (nn::has_gate(family.mlp) ? 3 : 2) * hidden * real_of(of.ffn);
  const double experts =
      hidden * (real_of(of.moe.experts) +
                3 * real_of(of.moe.experts + of.moe.shared_experts) *
                    real_of(of.moe.ffn));
  const double places =
      family.learned_positions ? real_of(of.max_seq) * hidden : 0;
  return real_of(of.num_blocks()) * attention_elements(of) + dense * mlp +
         with_experts * experts + 2 * real_of(of.mtp.layers) * hidden * hidden +
         2 * real_of(of.vocab) * hidden + places;
}

}  // namespace

void MoeConfig::declare(config::Section& section) {
  section
      .key("experts", experts,
           "experts of a layer, in a family that has them; 0: 8, elsewhere "
           "none")
      .at_least(0)
      .at_most(kMaxExperts);
  section.key("top_k", top_k, "experts that a token goes to")
      .at_least(1)
      .at_most(kMaxExperts);
  section
      .key("every", every, "every n-th layer has experts, the others are dense")
      .at_least(1)
      .at_most(kMaxSize);
  section
      .key("first_dense", first_dense,
           "so many layers at the beginning are dense")
      .at_least(0)
      .at_most(kMaxLayers);
  section.key("ffn", ffn, "width inside an expert; 0: model.ffn")
      .at_least(0)
      .at_most(kMaxSize);
  section
      .key("score", score,
           "what the gate makes of its products; auto: sigmoid for "
           "deepseek_v3, else softmax")
      .one_of({"auto", "softmax", "sigmoid"});
  section.key("normalize", normalize,
              "the weights of a token's experts add up to 1");
  section.key("scale", scale, "by which these weights are multiplied")
      .more_than(0)
      .at_most(1e6);
  section
      .key("groups", groups,
           "groups of experts, of which a token goes to the best")
      .at_least(1)
      .at_most(kMaxExperts);
  section.key("top_groups", top_groups, "groups that a token goes to")
      .at_least(1)
      .at_most(kMaxExperts);
  section
      .key("capacity_factor", capacity_factor,
           "tokens of a sample that an expert takes at most, over its even "
           "share; 0: all that come")
      .at_least(0)
      .at_most(1e6);
  section
      .key("shared_experts", shared_experts,
           "experts that every token goes to, beside the others")
      .at_least(0)
      .at_most(kMaxExperts);
  section
      .key("choice", choice,
           "who chooses: a token its top_k experts, or an expert those tokens "
           "of a sample that it has the highest scores of, as many as its "
           "capacity")
      .one_of({"tokens", "experts"});
  section.key("noise", noise,
              "training adds normal noise to the gate's products, of a size "
              "that it learns for each token and expert");
  section
      .key("balance", balance,
           "tokens whose load the balancing loss is of: those of a sample, of "
           "a micro-batch in a layer, or of one in all layers, as in "
           "transformers")
      .one_of({"sample", "layer", "batch"});
  section
      .key("aux_loss", aux_loss,
           "weight of the load-balancing loss, a mean over samples and layers")
      .at_least(0);
  section
      .key("z_loss", z_loss,
           "weight of the gates' squared log-sum-exp, a mean over tokens and "
           "layers")
      .at_least(0);
  section.key("bias_balance", bias_balance,
              "balance the load by a bias on the gate's scores, without a "
              "loss");
  section
      .key("bias_rate", bias_rate,
           "by which a step moves the bias of an expert")
      .more_than(0)
      .at_most(1);
}

void RopeScalingConfig::declare(config::Section& section) {
  section
      .key("type", type,
           "how rotary frequencies are stretched for longer sequences than the "
           "model was trained on")
      .one_of({"none", "linear", "llama3", "yarn"});
  section.key("factor", factor, "by which sequences are longer")
      .at_least(1)
      .at_most(1e6);
  section
      .key("original_max_seq", original_max_seq,
           "of llama3 and yarn: the longest sequence before")
      .at_least(0)
      .at_most(kMaxSize);
  const auto number = [&](const char* name, double& member,
                          const char* meaning) {
    section.key(name, member, meaning).at_least(0).at_most(1e6);
  };
  const auto rate = [&](const char* name, double& member, const char* meaning) {
    section.key(name, member, meaning).more_than(0).at_most(1e6);
  };
  rate("low_freq_factor", low_freq_factor,
       "of llama3: waves of fewer turns in the original length are stretched "
       "whole");
  rate("high_freq_factor", high_freq_factor,
       "of llama3: waves of more turns are kept");
  rate("beta_fast", beta_fast,
       "of yarn: features that turn more often in the original length are "
       "kept");
  rate("beta_slow", beta_slow,
       "of yarn: those that turn less often are stretched whole");
  section.key("truncate", truncate,
              "of yarn: the border between them is at whole features");
  number(
      "attention_factor", attention_factor,
      "of yarn: multiplies cosines and sines; 0: 0.1 ln(factor) + 1, or what "
      "mscale and mscale_all_dim give");
  number("mscale", mscale,
         "of yarn: where both are set, attention_factor is that of this weight "
         "over that of mscale_all_dim");
  number("mscale_all_dim", mscale_all_dim,
         "as mscale; and of deepseek_v3 the weight by which scores grow; 0: "
         "they do not");
}

void RopeScalingConfig::check() const {
  const bool needs_length = type == "llama3" || type == "yarn";
  TS_CHECK_CONFIG(!needs_length || original_max_seq > 0,
                  "model.rope_scaling.type ", type,
                  " needs model.rope_scaling.original_max_seq, the longest "
                  "sequence that the model was trained on.");
  TS_CHECK_CONFIG(type != "llama3" || high_freq_factor > low_freq_factor,
                  "model.rope_scaling.high_freq_factor (", high_freq_factor,
                  ") must be above model.rope_scaling.low_freq_factor (",
                  low_freq_factor, ").");
  TS_CHECK_CONFIG(type != "yarn" || beta_fast > beta_slow,
                  "model.rope_scaling.beta_fast (", beta_fast,
                  ") must be above model.rope_scaling.beta_slow (", beta_slow,
                  ").");
}

double RopeScalingConfig::yarn_scale(double weight) const {
  return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

void LatentConfig::declare(config::Section& section) {
  const auto size = [&](const char* name, int64_t& member,
                        const char* meaning) {
    section.key(name, member, meaning).at_least(0).at_most(kMaxSize);
  };
  size("q_rank", q_rank,
       "width of the vector that queries are made of; 0: of the hidden states "
       "themselves");
  size("kv_rank", kv_rank,
       "width of the vector that keys and values are made of; 0: 4 x "
       "value_dim");
  size("rope_dim", rope_dim,
       "features of a head that positions turn; 0: a third of model.head_dim");
  size("value_dim", value_dim,
       "width of a head's values; 0: model.head_dim - rope_dim");
}

void LatentConfig::refuse(const std::string& family) const {
  for (const auto& [key, value] : {std::pair{"q_rank", q_rank},
                                   {"kv_rank", kv_rank},
                                   {"rope_dim", rope_dim},
                                   {"value_dim", value_dim}}) {
    TS_CHECK_CONFIG(value == 0, "model.latent.", key, " is ", value,
                    ", but model.family ", family,
                    " has no latent attention. Use model.family deepseek_v3, "
                    "or leave model.latent out.");
  }
}

void LatentConfig::complete(int64_t head_dim) {
  if (rope_dim == 0) rope_dim = std::max<int64_t>(2, head_dim / 6 * 2);
  TS_CHECK_CONFIG(rope_dim % 2 == 0 && rope_dim < head_dim,
                  "model.latent.rope_dim (", rope_dim,
                  ") must be even and below model.head_dim (", head_dim,
                  "), of which it is a part.");
  if (value_dim == 0) value_dim = head_dim - rope_dim;
  TS_CHECK_CONFIG(value_dim <= head_dim, "model.latent.value_dim (", value_dim,
                  ") is above model.head_dim (", head_dim, "). Use ", head_dim,
                  " or less.");
  if (kv_rank == 0) kv_rank = 4 * value_dim;
}

void MtpConfig::declare(config::Section& section) {
  section
      .key("layers", layers,
           "modules behind the last layer, the k-th of which predicts the "
           "token k + 1 ahead, of family deepseek_v3; 0: none")
      .at_least(0)
      .at_most(kMaxMtpLayers);
  section
      .key("weight", weight,
           "of the mean of their losses, which training adds to its loss")
      .at_least(0)
      .at_most(1e6);
}

void MtpConfig::refuse(const std::string& family) const {
  TS_CHECK_CONFIG(layers == 0, "model.mtp.layers is ", layers,
                  ", but model.family ", family,
                  " has no multi-token prediction. Use a model.family that has "
                  "it (",
                  families_with(&Family::predicts_ahead),
                  "), or leave model.mtp out.");
}

void LoraConfig::declare(config::Section& section) {
  section
      .key("rank", rank,
           "of adapters, which alone are trained; 0: all weights are")
      .at_least(0)
      .at_most(kMaxSize);
  section.key("alpha", alpha, "adapters are scaled by alpha / rank")
      .more_than(0)
      .at_most(1e6);
  section.key("targets", targets,
              "linear layers with adapters: ends of their names, here or in "
              "Hugging Face folders, * for anything, as in attention.q or "
              "q_proj; none: all in the blocks");
  section.key("from", from,
              "PEFT folder whose adapters are trained on: its rank, alpha and "
              "targets");
}

void ModelConfig::declare(config::Section& section) {
  section.key("from", from,
              "Hugging Face folder, run folder or checkpoint that gives the "
              "model's sizes");
  section.key("load_weights", load_weights, "start from the weights in `from`");
  section.key("family", family, "what the decoder's blocks are made of")
      .one_of(names_of_families());
  const auto size = [&](const char* name, int64_t& member, int64_t minimum,
                        const char* meaning) {
    section.key(name, member, meaning)
        .at_least(static_cast<double>(minimum))
        .at_most(kMaxSize);
  };
  section.key("layers", layers, "decoder blocks")
      .at_least(1)
      .at_most(kMaxLayers);
  size("hidden", hidden, 1, "width of the residual stream");
  size("heads", heads, 1, "query heads");
  size("kv_heads", kv_heads, 0, "key and value heads; 0: as many as heads");
  size("head_dim", head_dim, 0, "width of a head; 0: hidden / heads");
  size("query_pre_attn_scalar", query_pre_attn_scalar, 0,
       "of gemma3_text: scores are divided by its root; 0: head_dim");
  size("ffn", ffn, 0,
       "width inside the MLP; 0: 4 x hidden for gpt2, else 8/3 x hidden, "
       "rounded up to a multiple of 64");
  size("vocab", vocab, 1, "tokens that the model knows");
  size("max_seq", max_seq, 1, "longest sequence in tokens");
  section.key("tie_embeddings", tie_embeddings,
              "the head shares the token embedding's weight");
  section.key("norm_eps", norm_eps, "added to the variance in norms")
      .more_than(0)
      .at_most(1);
  section.key("rope_theta", rope_theta, "base of the rotary frequencies")
      .more_than(1);
  section
      .key("rope_theta_local", rope_theta_local,
           "of gemma3_text: the base of layers that have the window, whose "
           "frequencies are not scaled; 0: they turn as the others do")
      .at_least(0);
  section.section("rope_scaling", rope_scaling,
                  "rotary positions for longer sequences");
  size("window", window, 0,
       "tokens that attention sees, itself the last of them; 0: all before it");
  size("window_every", window_every, 0,
       "every n-th layer sees all, the others have the window; 0: all have it");
  section
      .key("window_first_full", window_first_full,
           "so many layers at the beginning see all")
      .at_least(0)
      .at_most(kMaxLayers);
  section.section("latent", latent,
                  "attention with latent keys and values, of family "
                  "deepseek_v3");
  section
      .key("dropout", dropout,
           "share that training zeroes of embeddings, of attention's weights, "
           "and of what attention and MLP add to the residual stream")
      .at_least(0)
      .at_most(kMostDropout);
  section.section("moe", moe, "mixture of experts");
  section.section("mtp", mtp, "prediction of more than the next token");
  section.section("lora", lora, "fine-tuning by adapters of low rank");
}

void MoeConfig::complete(const std::string& family, int64_t layers) {
  constexpr int64_t kCustom = 8;
  const Family& facts = family_named(family);
  if (!facts.experts) {
    TS_CHECK_CONFIG(
        experts == 0, "model.moe.experts is ", experts, ", but model.family ",
        family, " is dense. Use a model.family with experts (",
        families_with_experts(), "), or leave model.moe.experts out.");
    return;
  }
  if (experts == 0) experts = kCustom;
  if (score == "auto") score = facts.sigmoid_gate ? "sigmoid" : "softmax";
  TS_CHECK_CONFIG(top_k <= experts, "model.moe.top_k (", top_k,
                  ") is above model.moe.experts (", experts,
                  "): a token goes to an expert once. Use ", experts,
                  " or less.");
  TS_CHECK_CONFIG(every <= layers, "model.moe.every (", every,
                  ") is above model.layers (", layers,
                  "): no layer would have experts. Use ", layers, " or less.");
  const int64_t last = layers / every * every - 1;  // with experts
  TS_CHECK_CONFIG(first_dense <= last, "model.moe.first_dense (", first_dense,
                  ") leaves none of ", layers, " layers for experts. Use ",
                  last, " or less.");
  check_groups();
  check_choice(bias_balance || facts.score_bias);
}

void MoeConfig::check_groups() const {
  TS_CHECK_CONFIG(
      experts % groups == 0, "model.moe.groups (", groups,
      ") does not divide model.moe.experts (", experts,
      "): groups are equally large. Nearest model.moe.groups: ",
      nearest_fitting(groups, experts,
                      [&](int64_t n) { return experts % n == 0; }),
      "; nearest model.moe.experts: ", nearest_multiples(experts, groups), ".");
  TS_CHECK_CONFIG(top_groups <= groups, "model.moe.top_groups (", top_groups,
                  ") is above model.moe.groups (", groups, "). Use ", groups,
                  " or less.");
  const int64_t each = experts / groups;
  TS_CHECK_CONFIG(top_groups * each >= top_k, "model.moe.top_k (", top_k,
                  ") is above the experts of model.moe.top_groups (",
                  top_groups, " groups of ", each, "). Use top_groups ",
                  (top_k + each - 1) / each, " or more.");
}

void MoeConfig::check_choice(bool has_bias) const {
  if (!experts_choose()) return;
  TS_CHECK_CONFIG(
      capacity_factor > 0,
      "model.moe.choice experts needs model.moe.capacity_factor: an "
      "expert takes so many times its even share of a sample's "
      "tokens. Use 1, and each token has model.moe.top_k (",
      top_k, ") experts on average.");
  const double most = static_cast<double>(experts) / static_cast<double>(top_k);
  TS_CHECK_CONFIG(capacity_factor <= most, "model.moe.capacity_factor (",
                  capacity_factor,
                  ") gives an expert more than all tokens of a sample, with "
                  "model.moe.choice experts. Use ",
                  most, " or less.");
  TS_CHECK_CONFIG(groups == 1, "model.moe.groups (", groups,
                  ") are of tokens that choose. Use 1, or model.moe.choice "
                  "tokens.");
  TS_CHECK_CONFIG(
      !has_bias,
      "model.moe.choice experts has no use for a bias that balances "
      "the load, which is even. Use model.moe.bias_balance false in "
      "model.family mixtral or qwen3_moe, or model.moe.choice "
      "tokens.");
}

bool ModelConfig::has_windows() const {
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (window_of(layer) > 0) return true;
  }
  return false;
}

bool ModelConfig::has_score_bias() const {
  return moe.bias_balance || family_named(family).score_bias;
}

void ModelConfig::check_window() const {
  if (window == 0) return;
  const Family& facts = family_named(family);
  TS_CHECK_CONFIG(facts.windows != Windows::kNone, "model.window is ", window,
                  ", but attention of model.family ", family,
                  " has no window. Use a model.family that has one (",
                  families_with_windows(), "), or leave model.window out.");
  const bool has_all = window_every == 0 && window_first_full == 0;
  TS_CHECK_CONFIG(facts.windows == Windows::kByLayer || has_all,
                  "all layers of model.family ", family,
                  " have the window. Leave model.window_every (", window_every,
                  ") and model.window_first_full (", window_first_full,
                  ") out.");
  TS_CHECK_CONFIG(has_windows(), "model.window is ", window,
                  ", but model.window_every (", window_every,
                  ") and model.window_first_full (", window_first_full,
                  ") leave it to none of ", layers,
                  " layers. Leave model.window out, or use model.window_every "
                  "of 2 or more and fewer first layers that see all.");
}

void ModelConfig::check_local_theta() const {
  if (rope_theta_local == 0) return;
  TS_CHECK_CONFIG(family_named(family).local_theta,
                  "model.rope_theta_local is ", rope_theta_local,
                  ", but all layers of model.family ", family,
                  " turn alike. Use a model.family whose layers differ (",
                  families_with(&Family::local_theta),
                  "), or leave model.rope_theta_local out.");
  TS_CHECK_CONFIG(rope_theta_local > 1, "model.rope_theta_local is ",
                  rope_theta_local,
                  "; a base must be above 1. Use 0 for that of the other "
                  "layers.");
  TS_CHECK_CONFIG(window > 0, "model.rope_theta_local is ", rope_theta_local,
                  ", but no layer has a window: set model.window, or leave "
                  "model.rope_theta_local out.");
}

void ModelConfig::check_mtp() const {
  if (mtp.layers == 0) return;
  if (!family_named(family).predicts_ahead) mtp.refuse(family);
  TS_CHECK_CONFIG(lora.rank == 0, "model.lora.rank is ", lora.rank,
                  ", but modules of multi-token prediction (model.mtp.layers ",
                  mtp.layers,
                  ") are trained whole, and adapters alone are trained beside "
                  "them. Use model.mtp.layers 0, or model.lora.rank 0.");
}

void ModelConfig::complete_query_scalar() {
  if (family_named(family).query_scalar) {
    if (query_pre_attn_scalar == 0) query_pre_attn_scalar = head_dim;
    return;
  }
  TS_CHECK_CONFIG(query_pre_attn_scalar == 0, "model.query_pre_attn_scalar is ",
                  query_pre_attn_scalar, ", but scores of model.family ",
                  family,
                  " are divided by the root of model.head_dim. Use a "
                  "model.family that says otherwise (",
                  families_with(&Family::query_scalar),
                  "), or leave model.query_pre_attn_scalar out.");
}

double ModelConfig::query_scale() const {
  if (query_pre_attn_scalar > 0) {
    return std::sqrt(static_cast<double>(head_dim) /
                     static_cast<double>(query_pre_attn_scalar));
  }
  if (latent.rope_dim == 0 || rope_scaling.type == "none") return 1;
  const double scale = rope_scaling.yarn_scale(rope_scaling.mscale_all_dim);
  return scale * scale;
}

void ModelConfig::complete() {
  const Family& facts = family_named(family);
  moe.complete(family, layers);
  if (kv_heads == 0) kv_heads = heads;
  TS_CHECK_CONFIG(
      heads % kv_heads == 0, "model.heads (", heads,
      ") is no multiple of model.kv_heads (", kv_heads,
      "). Each key and value head serves equally many query heads.");
  TS_CHECK_CONFIG(head_dim > 0 || hidden % heads == 0, "model.hidden (", hidden,
                  ") is no multiple of model.heads (", heads, "). Use hidden ",
                  (hidden / heads + 1) * heads,
                  ", another number of heads, or set model.head_dim.");
  if (head_dim == 0) head_dim = hidden / heads;
  TS_CHECK_CONFIG(!facts.heads_fill_width ||
                      (kv_heads == heads && head_dim * heads == hidden),
                  "model.family ", family, " has as many kv_heads as heads (",
                  kv_heads, ", ", heads, ") and heads x head_dim = hidden (",
                  heads, " x ", head_dim, ", ", hidden,
                  "). Use family llama for another shape.");
  TS_CHECK_CONFIG(facts.learned_positions || head_dim % 2 == 0,
                  "model.head_dim (", head_dim,
                  ") is odd. Rotary positions turn pairs: use an even one.");
  rope_scaling.check();
  check_window();
  check_local_theta();
  check_mtp();
  complete_query_scalar();
  if (facts.latent_attention) {
    TS_CHECK_CONFIG(kv_heads == heads, "model.kv_heads (", kv_heads,
                    ") differs from model.heads (", heads,
                    "), but each head of model.family ", family,
                    " has keys of its own. Leave model.kv_heads out.");
    latent.complete(head_dim);
  } else {
    latent.refuse(family);
  }
  if (ffn == 0) {
    ffn = facts.mlp == nn::MlpKind::kGelu
              ? 4 * hidden
              : ((8 * hidden + 2) / 3 + 63) / 64 * 64;
  }
  if (moe.experts > 0 && moe.ffn == 0) moe.ffn = ffn;
  check_countable();
}

// What a run holds is counted in bytes of 64 bits, and so are the operations
// of a token (flops_per_token).
void ModelConfig::check_countable() const {
  constexpr double kMost = 1e15, kMostOperations = 1e18;
  const double all = elements_of(*this, family_named(family));
  TS_CHECK_CONFIG(
      all < kMost, "model: some ", count_text(all), " parameters; at most ",
      count_text(kMost),
      " can be counted. Lower model.layers, hidden, heads, head_dim, "
      "ffn, vocab, moe.experts or moe.ffn.");
  const double keys = real_of(num_blocks()) * real_of(max_seq);
  const double operations =
      6 * real_of(heads) * real_of(head_dim + value_dim()) * keys;
  TS_CHECK_CONFIG(
      operations < kMostOperations, "model: attention of a token over ",
      "model.max_seq ", max_seq, " takes some ", count_text(operations),
      " operations; at most ", count_text(kMostOperations),
      " can be counted. Lower model.max_seq, layers, heads or head_dim.");
}

}  // namespace tessera::models
