#include "tessera/models/decoder.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cmath>

#include "tessera/core/device.h"
#include "tessera/models/adapters.h"
#include "tessera/nn/latent_attention.h"

namespace tessera::models {
namespace {

constexpr double kInitStd = 0.02;

// What 2 * layers additions to the residual stream keep at the scale of one
// (Radford et al. 2019, GPT-2, section 2.3).
double residual_std(const ModelConfig& config) {
  return kInitStd / std::sqrt(2.0 * static_cast<double>(config.layers));
}

std::shared_ptr<nn::Norm> make_norm(const ModelConfig& config) {
  return std::make_shared<nn::Norm>(family_named(config.family).norm,
                                    config.hidden, config.norm_eps);
}

// As tensors of the type have it.
double rounded_to(at::ScalarType type, double number) {
  const auto single = static_cast<float>(number);
  switch (type) {
    case at::kDouble:
      return number;
    case at::kBFloat16:
      return static_cast<float>(c10::BFloat16(single));
    case at::kHalf:
      return static_cast<float>(c10::Half(single));
    default:
      return single;
  }
}

nn::RopeScaling rope_scaling(const RopeScalingConfig& config) {
  using Kind = nn::RopeScaling::Kind;
  nn::RopeScaling scaling{.kind = config.type == "linear"   ? Kind::kLinear
                                  : config.type == "llama3" ? Kind::kLlama3
                                  : config.type == "yarn"   ? Kind::kYarn
                                                            : Kind::kNone,
                          .factor = config.factor,
                          .original_length = config.original_max_seq,
                          .low_freq_factor = config.low_freq_factor,
                          .high_freq_factor = config.high_freq_factor,
                          .beta_fast = config.beta_fast,
                          .beta_slow = config.beta_slow,
                          .truncate = config.truncate};
  if (scaling.kind != Kind::kYarn) return scaling;
  if (config.attention_factor > 0) {
    scaling.attention_factor = config.attention_factor;
  } else if (config.mscale > 0 && config.mscale_all_dim > 0) {
    scaling.attention_factor = config.yarn_scale(config.mscale) /
                               config.yarn_scale(config.mscale_all_dim);
  } else {
    scaling.attention_factor = config.yarn_scale(1);
  }
  return scaling;
}

std::shared_ptr<nn::Attention> make_attention(const ModelConfig& config) {
  const Family& family = family_named(config.family);
  if (family.latent_attention) {
    const LatentConfig& latent = config.latent;
    return std::make_shared<nn::LatentAttention>(
        nn::LatentAttentionOptions{.width = config.hidden,
                                   .heads = config.heads,
                                   .head_dim = config.head_dim,
                                   .rope_dim = latent.rope_dim,
                                   .value_dim = latent.value_dim,
                                   .q_rank = latent.q_rank,
                                   .kv_rank = latent.kv_rank,
                                   .q_scale = config.query_scale(),
                                   .init_std = kInitStd,
                                   .out_init_std = residual_std(config)});
  }
  return std::make_shared<nn::GroupedQueryAttention>(
      nn::AttentionOptions{.width = config.hidden,
                           .heads = config.heads,
                           .kv_heads = config.kv_heads,
                           .head_dim = config.head_dim,
                           .qkv_bias = family.qkv_bias,
                           .out_bias = family.out_bias,
                           .qk_norm = family.qk_norm,
                           .norm = family.norm,
                           .norm_eps = config.norm_eps,
                           .q_scale = config.query_scale(),
                           .init_std = kInitStd,
                           .out_init_std = residual_std(config)});
}

nn::MlpOptions mlp_options(const ModelConfig& config) {
  const Family& family = family_named(config.family);
  return {.kind = family.mlp,
          .width = config.hidden,
          .hidden = config.ffn,
          .bias = family.mlp_bias,
          .init_std = kInitStd,
          .out_init_std = residual_std(config)};
}

nn::MoeOptions moe_options(const ModelConfig& config, int64_t layer) {
  const MoeConfig& moe = config.moe;
  nn::MlpOptions expert = mlp_options(config);
  expert.hidden = moe.ffn;
  return {.router = {.experts = moe.experts,
                     .top_k = moe.top_k,
                     .choice = moe.experts_choose() ? nn::GateChoice::kExperts
                                                    : nn::GateChoice::kTokens,
                     .score = moe.score == "sigmoid" ? nn::GateScore::kSigmoid
                                                     : nn::GateScore::kSoftmax,
                     .normalize = moe.normalize,
                     .scale = moe.scale,
                     .groups = moe.groups,
                     .top_groups = moe.top_groups},
          .expert = expert,
          .shared_width = moe.shared_experts * moe.ffn,
          .capacity_factor = moe.capacity_factor,
          .has_bias = config.has_score_bias(),
          .moves_bias = moe.bias_balance,
          .has_noise = moe.noise,
          .balance = moe.balance == "batch"   ? nn::BalanceOver::kBatch
                     : moe.balance == "layer" ? nn::BalanceOver::kLayer
                                              : nn::BalanceOver::kSample,
          .aux_loss = moe.aux_loss,
          .z_loss = moe.z_loss,
          .layer = config.layers_with_experts(layer),
          .layers = config.layers_with_experts()};
}

}  // namespace

DecoderBlock::Norms DecoderBlock::make_norms(const ModelConfig& config,
                                             const std::string& name) {
  const NormPlaces places = family_named(config.family).norms;
  const auto norm = register_module(name, make_norm(config));
  if (places == NormPlaces::kBefore) return {norm, nullptr};
  if (places == NormPlaces::kBehind) return {nullptr, norm};
  return {norm, register_module(name + "_behind", make_norm(config))};
}

DecoderBlock::DecoderBlock(const ModelConfig& config, int64_t index)
    : attention_norms_(make_norms(config, "attention_norm")),
      attention_(register_module("attention", make_attention(config))),
      mlp_norms_(make_norms(config, "mlp_norm")) {
  if (config.has_experts(index)) {
    moe_ = register_module(
        "moe", std::make_shared<nn::Moe>(moe_options(config, index)));
  } else {
    mlp_ =
        register_module("mlp", std::make_shared<nn::Mlp>(mlp_options(config)));
  }
}

at::Tensor DecoderBlock::forward(const at::Tensor& x, const nn::Places& places,
                                 const nn::MoeTokens& experts,
                                 nn::KvCache* cache, nn::CoreAgain* again,
                                 const BlockDropout& dropout) const {
  // Nobody keeps what a part or a norm gives: the sum takes its place. Not of a
  // view, as experts give one.
  const auto add = [&](const at::Tensor& past, const at::Tensor& made,
                       const nn::Dropout& of) {
    if (of) return nn::add_kept(past, made, of, dropout.positions);
    return made.is_view() ? past + made : made.add_(past);
  };
  const auto half = [&](const at::Tensor& in, const Norms& norms,
                        const auto& part, const nn::Dropout& of) {
    const auto [past, normed] =
        norms.before ? norms.before->branch(in) : std::pair(in, in);
    const at::Tensor made = part(normed);
    return add(past, norms.behind ? norms.behind->forward(made) : made, of);
  };
  const at::Tensor y = half(
      x, attention_norms_,
      [&](const at::Tensor& in) {
        return attention_->forward(in, places, cache, again);
      },
      dropout.attention);
  return half(
      y, mlp_norms_,
      [&](const at::Tensor& in) {
        return moe_ ? moe_->forward(in, experts) : mlp_->forward(in);
      },
      dropout.mlp);
}

Decoder::Decoder(const ModelConfig& given) : Model(given) {
  const ModelConfig& config = this->config();
  const Family& family = family_named(config.family);
  auto embed = register_module("embed", std::make_shared<nn::Room>());
  tokens_ = embed->register_module(
      "tokens",
      std::make_shared<nn::Embedding>(config.vocab, config.hidden, kInitStd,
                                      nn::Role::vocabulary()));
  if (family.learned_positions) {
    positions_ = embed->register_module(
        "positions", std::make_shared<nn::Embedding>(config.max_seq,
                                                     config.hidden, kInitStd));
  } else {
    rotary_ = nn::RotaryTable(config.rotary_dim(), config.rope_theta,
                              rope_scaling(config.rope_scaling));
    local_rotary_ =
        nn::RotaryTable(config.rotary_dim(), config.rope_theta_local);
  }
  auto blocks = register_module("blocks", std::make_shared<nn::Room>());
  for (int64_t i = 0; i < config.num_blocks(); ++i) {
    blocks_.push_back(blocks->register_module(
        std::to_string(i), std::make_shared<DecoderBlock>(config, i)));
    if (i < config.layers) continue;
    ahead_.push_back(blocks_.back()->register_module(
        "mtp", std::make_shared<AheadModule>(AheadOptions{
                   family.norm, config.hidden, config.norm_eps, kInitStd})));
  }
  final_norm_ = register_module("final_norm", make_norm(config));
  if (!config.tie_embeddings) {
    head_ =
        register_module("head", std::make_shared<nn::Linear>(nn::LinearOptions{
                                    config.hidden, config.vocab, /*bias=*/false,
                                    kInitStd, nn::Role::vocabulary()}));
  }
  add_adapters(*this);
  assign_units(*embed);
}

// The first module ahead takes what the head does, and each embeds tokens.
void Decoder::assign_units(torch::nn::Module& embed) {
  const int64_t last = num_units() - 1;
  assign(embed, {0});
  std::vector<int64_t> of_tokens = {0}, of_norm = {last};
  for (int64_t unit = 1; unit < last; ++unit) {
    assign(*blocks_[unit - 1], {unit});
    if (is_ahead(unit)) of_tokens.push_back(unit);
  }
  if (num_ahead() > 0) of_norm.push_back(last - num_ahead());
  assign(*final_norm_, of_norm);
  if (head_) {
    assign(*head_, {last});
  } else {
    of_tokens.push_back(last);
  }
  assign(*tokens_, of_tokens);
}

at::Tensor Decoder::forward_unit(int64_t unit, const at::Tensor& x,
                                 const Tokens& tokens, nn::Balance* balance,
                                 nn::CoreAgain* again) {
  if (unit == 0) return embed_dropped(x, tokens, "embed");
  if (unit == num_units() - 1) {
    return before_head(x, tokens.ahead.defined() ? num_ahead() : 0);
  }
  if (is_ahead(unit)) return predict_ahead(unit, x, tokens, balance, again);
  return run_block(unit - 1, x, tokens, balance, again);
}

at::Tensor Decoder::embed_dropped(const at::Tensor& ids, const Tokens& tokens,
                                  const std::string& name) {
  const at::Tensor found = embed(ids, /*begin=*/0, tokens.document_starts);
  if (!drops(tokens)) return found;
  return nn::add_kept({}, found,
                      nn::dropout_named(name, config().dropout, *tokens.draw),
                      runs_here(0, tokens.length));
}

at::Tensor Decoder::run_block(int64_t layer, const at::Tensor& x,
                              const Tokens& tokens, nn::Balance* balance,
                              nn::CoreAgain* again) {
  const BlockDropout dropout =
      drops(tokens) ? block_dropout(layer, tokens) : BlockDropout{};
  const DecoderBlock& block = *blocks_.at(layer);
  return block.forward(
      x,
      {rotation_of(layer, 0, tokens.length, x),
       {tokens.document_starts, dropout.weights, config().window_of(layer)}},
      {.positions = expert_positions(block, tokens),
       .balance = balance,
       .load = tokens.load.get(),
       .draw = tokens.draw ? &*tokens.draw : nullptr,
       .unpadded = tokens.unpadded},
      /*cache=*/nullptr, again, dropout);
}

// Each depth takes what the head takes of the one before (eq. 21 to 23).
at::Tensor Decoder::enter_ahead(int64_t depth, const at::Tensor& x,
                                const Tokens& tokens) {
  TORCH_INTERNAL_ASSERT(tokens.ahead.defined(),
                        "the tokens ahead are not there");
  const int64_t samples = x.size(0) / depth;
  at::Tensor before = x.narrow(0, (depth - 1) * samples, samples);
  if (depth == 1) before = final_norm_->forward(before);
  const std::string name =
      c10::str("blocks.", config().layers + depth - 1, ".mtp.embed");
  const at::Tensor embedded =
      embed_dropped(tokens.ahead[depth - 1], tokens, name);
  return ahead_.at(depth - 1)->enter(embedded, before);
}

at::Tensor Decoder::predict_ahead(int64_t unit, const at::Tensor& x,
                                  const Tokens& tokens, nn::Balance* balance,
                                  nn::CoreAgain* again) {
  const int64_t depth = unit - config().layers;
  const at::Tensor y = run_block(unit - 1, enter_ahead(depth, x, tokens),
                                 tokens, balance, again);
  return ahead_.at(depth - 1)->leave(x, y);
}

// Of the tokens that its gate sees.
nn::Positions Decoder::expert_positions(const DecoderBlock& block,
                                        const Tokens& tokens) const {
  if (!block.moe() || !block.moe()->needs_positions()) return {};
  if (tokens.drops_none) return {};
  return block.moe()->shard().region.enter ? runs_of(0, tokens.length)
                                           : runs_here(0, tokens.length);
}

BlockDropout Decoder::block_dropout(int64_t layer, const Tokens& tokens) const {
  const auto of = [&](const char* part) {
    return nn::dropout_named("blocks." + std::to_string(layer) + part,
                             config().dropout, *tokens.draw);
  };
  return {.weights = of(".attention.weights"),
          .attention = of(".attention"),
          .mlp = of(".mlp"),
          .positions = runs_here(0, tokens.length)};
}

void Decoder::set_region(const nn::Region& region) {
  for (const auto& block : blocks_) {
    block->attention()->set_region(region);
    if (block->mlp()) block->mlp()->set_region(region);
    if (block->moe() && block->moe()->shared()) {
      block->moe()->shared()->set_region(region);
    }
  }
}

void Decoder::set_vocabulary(const VocabularyShard& shard) {
  tokens_->set_rows(shard.first, shard.region.leave);
  enter_head_ = shard.region.enter;
  set_loss(shard.loss, shard.most);
}

void Decoder::set_attention(const nn::Attention::Core& core) {
  for (const auto& block : blocks_) block->attention()->set_core(core);
}

void Decoder::set_experts(const nn::ExpertShard& shard) {
  for (const auto& block : blocks_) {
    if (block->moe()) block->moe()->set_shard(shard);
  }
}

nn::Rotation Decoder::rotation_of(int64_t layer, int64_t begin, int64_t tokens,
                                  const at::Tensor& like) {
  const auto runs = runs_of(begin, tokens);
  if (positions_) return {};
  auto& table = config().turns_locally(layer) ? local_rotary_ : rotary_;
  if (runs.size() == 1) {
    return table.rows(runs[0].first, runs[0].second, like);
  }
  std::vector<at::Tensor> cos, sin;
  for (const auto& [first, length] : runs) {
    const nn::Rotation part = table.rows(first, length, like);
    cos.push_back(part.cos);
    sin.push_back(part.sin);
  }
  return {at::cat(cos), at::cat(sin)};
}

at::Tensor Decoder::forward_unit_cached(int64_t unit, const at::Tensor& x,
                                        int64_t begin, Cache& cache) {
  if (unit == 0) return embed(x, begin);
  if (is_ahead(unit)) return x;
  if (unit == num_units() - 1) {
    return logits_of(before_head(x).select(1, -1));
  }
  const nn::Sight sight{.window = config().window_of(unit - 1)};
  return blocks_.at(unit - 1)->forward(
      x, {rotation_of(unit - 1, begin, x.size(1), x), sight},
      /*experts=*/{}, &cache.layers.at(unit - 1));
}

// Learned positions count from the document's begin. Rotary ones need not: only
// distances are in what they give.
at::Tensor Decoder::embed(const at::Tensor& ids, int64_t begin,
                          const at::Tensor& document_starts) const {
  at::Tensor x = tokens_->forward(ids);
  if (family_named(config().family).scales_embedding) {
    // By a number of its type, as transformers has it; nobody keeps x.
    const auto width = static_cast<double>(config().hidden);
    x.mul_(rounded_to(x.scalar_type(), std::sqrt(width)));
  }
  if (!positions_) return x;
  at::Tensor places = nn::each_of(runs_here(begin, ids.size(1)), ids.options());
  if (document_starts.defined()) {
    places =
        places - sent_to(document_starts, ids.device()).index_select(1, places);
  }
  return x + positions_->forward(places);
}

at::Tensor Decoder::before_head(const at::Tensor& x, int64_t ahead) const {
  const int64_t samples = x.size(0) / (1 + ahead);
  const at::Tensor normed =
      ahead == 0 ? final_norm_->forward(x)
                 : at::cat({final_norm_->forward(x.narrow(0, 0, samples)),
                            x.narrow(0, samples, ahead * samples)});
  return enter_head_ ? enter_head_(normed) : normed;
}

at::Tensor Decoder::head_weight() const {
  return head_ ? head_->weight() : tokens_->weight();
}

}  // namespace tessera::models
