#include "tessera/models/decoder.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cmath>

#include "tessera/core/error.h"

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

nn::AttentionOptions attention_options(const ModelConfig& config) {
  const Family& family = family_named(config.family);
  return {.width = config.hidden,
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .qkv_bias = family.qkv_bias,
          .out_bias = family.out_bias,
          .qk_norm = family.qk_norm,
          .norm_eps = config.norm_eps,
          .init_std = kInitStd,
          .out_init_std = residual_std(config)};
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

}  // namespace

DecoderBlock::DecoderBlock(const ModelConfig& config, bool has_experts)
    : attention_norm_(register_module("attention_norm", make_norm(config))),
      attention_(register_module("attention", std::make_shared<nn::Attention>(
                                                  attention_options(config)))),
      mlp_norm_(register_module("mlp_norm", make_norm(config))) {
  const nn::MlpOptions mlp = mlp_options(config);
  if (has_experts) {
    moe_ =
        register_module("moe", std::make_shared<nn::Moe>(nn::MoeOptions{
                                   config.moe.experts, config.moe.top_k, mlp}));
  } else {
    mlp_ = register_module("mlp", std::make_shared<nn::Mlp>(mlp));
  }
}

at::Tensor DecoderBlock::forward(const at::Tensor& x,
                                 const nn::Rotation& rotation,
                                 nn::KvCache* cache,
                                 nn::Balance* balance) const {
  const at::Tensor y =
      x + attention_->forward(attention_norm_->forward(x), rotation, cache);
  const at::Tensor normed = mlp_norm_->forward(y);
  return y + (moe_ ? moe_->forward(normed, balance) : mlp_->forward(normed));
}

Decoder::Decoder(ModelConfig config) {
  config.complete();
  config_ = config;
  const Family& family = family_named(config.family);
  auto embed = register_module("embed", std::make_shared<nn::Room>());
  tokens_ = embed->register_module(
      "tokens",
      std::make_shared<nn::Embedding>(config.vocab, config.hidden, kInitStd));
  if (family.learned_positions) {
    positions_ = embed->register_module(
        "positions", std::make_shared<nn::Embedding>(config.max_seq,
                                                     config.hidden, kInitStd));
  } else {
    rotary_ = nn::RotaryTable(config.head_dim, config.rope_theta);
  }
  auto blocks = register_module("blocks", std::make_shared<nn::Room>());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(blocks->register_module(
        std::to_string(i),
        std::make_shared<DecoderBlock>(config, config.has_experts(i))));
  }
  final_norm_ = register_module("final_norm", make_norm(config));
  if (!config.tie_embeddings) {
    head_ = register_module(
        "head", std::make_shared<nn::Linear>(nn::LinearOptions{
                    config.hidden, config.vocab, /*bias=*/false, kInitStd}));
  }
}

at::Tensor Decoder::forward(const at::Tensor& ids) {
  return logits_of(hidden(ids, /*cache=*/nullptr, /*balance=*/nullptr));
}

nn::LossSum Decoder::loss(const at::Tensor& ids, const at::Tensor& targets,
                          nn::Balance* balance) {
  return loss_of(logits_of(hidden(ids, /*cache=*/nullptr, balance)), targets);
}

nn::LossSum Decoder::loss_of(at::Tensor logits,
                             const at::Tensor& targets) const {
  if (!vocabulary_.group) return nn::cross_entropy(std::move(logits), targets);
  return nn::cross_entropy(std::move(logits), targets, vocabulary_);
}

int64_t Decoder::unit_of(const std::string& parameter) const {
  constexpr std::string_view blocks = "blocks.";
  if (parameter.starts_with("embed.")) return 0;
  if (!parameter.starts_with(blocks)) return num_units() - 1;
  return std::stoll(parameter.substr(blocks.size())) + 1;
}

at::Tensor Decoder::forward_unit(int64_t unit, const at::Tensor& x,
                                 int64_t tokens, nn::Balance* balance) {
  if (unit == 0) return embed(x, /*begin=*/0);
  if (unit == num_units() - 1) return logits_of(final_norm_->forward(x));
  return blocks_.at(unit - 1)->forward(x, rotation_of(0, tokens, x),
                                       /*cache=*/nullptr, balance);
}

void Decoder::set_head(nn::Transform enter, nn::VocabularyShard shard) {
  enter_head_ = std::move(enter);
  vocabulary_ = shard;
}

void Decoder::set_sequence_shard(int64_t rank, int64_t size) {
  sequence_rank_ = rank;
  sequence_size_ = size;
}

void Decoder::set_pieces(std::vector<int64_t> pieces) {
  pieces_ = std::move(pieces);
}

std::vector<std::pair<int64_t, int64_t>> Decoder::runs_of(
    int64_t begin, int64_t tokens) const {
  const int64_t length = tokens / static_cast<int64_t>(pieces_.size());
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (int64_t piece : pieces_) {
    runs.emplace_back(begin + piece * length, length);
    TS_CHECK_CONFIG(runs.back().first + length <= config_.max_seq,
                    "model: a sequence of ", runs.back().first + length,
                    " tokens is longer than model.max_seq ", config_.max_seq,
                    ".");
  }
  return runs;
}

nn::Rotation Decoder::rotation_of(int64_t begin, int64_t tokens,
                                  const at::Tensor& like) {
  const auto runs = runs_of(begin, tokens);
  if (positions_) return {};
  if (runs.size() == 1) {
    return rotary_.rows(runs[0].first, runs[0].second, like);
  }
  std::vector<at::Tensor> cos, sin;
  for (const auto& [first, length] : runs) {
    const nn::Rotation part = rotary_.rows(first, length, like);
    cos.push_back(part.cos);
    sin.push_back(part.sin);
  }
  return {at::cat(cos), at::cat(sin)};
}

at::Tensor Decoder::forward_cached(const at::Tensor& ids, DecoderCache& cache) {
  const at::NoGradGuard no_grad;
  return logits_of(hidden(ids, &cache, /*balance=*/nullptr).select(1, -1));
}

DecoderCache Decoder::make_cache(int64_t capacity) const {
  return {std::vector<nn::KvCache>(blocks_.size(),
                                   nn::KvCache{.capacity = capacity})};
}

at::Tensor Decoder::embed(const at::Tensor& ids, int64_t begin) const {
  const at::Tensor x = tokens_->forward(ids);
  if (!positions_) return x;
  std::vector<at::Tensor> places;
  for (const auto& [first, length] : runs_of(begin, ids.size(1))) {
    places.push_back(at::arange(first, first + length, ids.options()));
  }
  const int64_t length = ids.size(1) / sequence_size_;
  return x + positions_->forward(
                 at::cat(places).narrow(0, sequence_rank_ * length, length));
}

at::Tensor Decoder::hidden(const at::Tensor& ids, DecoderCache* cache,
                           nn::Balance* balance) {
  const int64_t begin = cache ? cache->length() : 0;
  at::Tensor x = embed(ids, begin);
  const nn::Rotation rotation = rotation_of(begin, ids.size(1), x);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    x = blocks_[i]->forward(x, rotation, cache ? &cache->layers[i] : nullptr,
                            balance);
  }
  return final_norm_->forward(x);
}

at::Tensor Decoder::logits_of(const at::Tensor& normed) const {
  const at::Tensor hidden = enter_head_ ? enter_head_(normed) : normed;
  return head_ ? head_->forward(hidden) : at::linear(hidden, tokens_->weight());
}

bool is_of_expert(const std::string& parameter) {
  return parameter.find(".moe.experts.") != std::string::npos;
}

int64_t num_parameters(const ModelConfig& config) {
  Decoder decoder(config);
  return nn::num_parameters(decoder);
}

int64_t num_expert_parameters(const ModelConfig& config) {
  const Decoder decoder(config);
  int64_t total = 0;
  for (const auto& block : decoder.blocks()) {
    if (!block->moe()) continue;
    for (const auto& expert : block->moe()->experts()) {
      total += nn::num_parameters(*expert);
    }
  }
  return total;
}

int64_t flops_per_token(const ModelConfig& config, int64_t seq_len) {
  Decoder decoder(config);
  const ModelConfig& full = decoder.config();
  int64_t multiplied = full.tie_embeddings ? full.vocab * full.hidden : 0;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    const auto& layout = parameter.spec->layout;
    const bool is_weight = layout.global_shape().size() == 2;
    const bool is_lookup = parameter.name.starts_with("embed.");
    if (!is_weight || is_lookup) continue;
    const int64_t size = layout.global_numel();
    multiplied += is_of_expert(parameter.name)
                      ? size / full.moe.experts * full.moe.top_k
                      : size;
  }
  return 6 * multiplied +
         12 * full.layers * full.heads * full.head_dim * seq_len;
}

}  // namespace tessera::models
