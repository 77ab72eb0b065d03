#include "tessera/models/model_config.h"

#include "tessera/core/error.h"
#include "tessera/models/family.h"

namespace tessera::models {

void MoeConfig::declare(config::Section& section) {
  section
      .key("experts", experts,
           "experts of a layer, in family mixtral; 0: its 8, elsewhere none")
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
      .key("capacity_factor", capacity_factor,
           "tokens that an expert takes, over its even share; 0: all that come")
      .at_least(0)
      .not_built("dropping tokens");
  section
      .key("shared_experts", shared_experts, "experts that every token goes to")
      .at_least(0)
      .at_most(kMaxSize)
      .not_built("shared experts");
  section
      .key("aux_loss", aux_loss,
           "weight of the load-balancing loss, a mean over samples and layers")
      .at_least(0);
  section
      .key("bias_balance", bias_balance,
           "balance the load by a bias on the gate, without a loss")
      .not_built("balance by a bias");
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
      .key("dropout", dropout,
           "share that training zeroes of embeddings, of attention's weights, "
           "and of what attention and MLP add to the residual stream")
      .at_least(0)
      .at_most(kMostDropout);
  section.section("moe", moe, "mixture of experts");
  section.section("lora", lora, "fine-tuning by adapters of low rank");
}

void MoeConfig::complete(const std::string& family, int64_t layers) {
  constexpr int64_t kMixtrals = 8;
  if (!family_named(family).experts) {
    TS_CHECK_CONFIG(experts == 0, "model.moe.experts is ", experts,
                    ", but model.family ", family,
                    " is dense. Use model.family mixtral, or leave "
                    "model.moe.experts out.");
    return;
  }
  if (experts == 0) experts = kMixtrals;
  TS_CHECK_CONFIG(top_k <= experts, "model.moe.top_k (", top_k,
                  ") is above model.moe.experts (", experts,
                  "): a token goes to an expert once. Use ", experts,
                  " or less.");
  TS_CHECK_CONFIG(every <= layers, "model.moe.every (", every,
                  ") is above model.layers (", layers,
                  "): no layer would have experts. Use ", layers, " or less.");
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
  if (ffn == 0) {
    ffn = facts.mlp == nn::MlpKind::kGelu
              ? 4 * hidden
              : ((8 * hidden + 2) / 3 + 63) / 64 * 64;
  }
}

}  // namespace tessera::models
