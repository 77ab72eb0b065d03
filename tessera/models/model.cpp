#include "tessera/models/model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/models/decoder.h"
#include "tessera/nn/matmul.h"

namespace tessera::models {
namespace {

ModelConfig completed(ModelConfig config) {
  config.complete();
  return config;
}

// Elements of a parameter that one token goes through.
int64_t active_of(const nn::ParameterSpec& spec, const ModelConfig& config) {
  const int64_t all = spec.layout.global_numel();
  if (!spec.layout.is_of_expert()) return all;
  const int64_t chosen = all / config.moe.experts * config.moe.top_k;
  if (!config.moe.experts_choose()) return chosen;
  return std::llround(static_cast<double>(chosen) *
                      config.moe.capacity_factor);  // on average
}

}  // namespace

Model::Model(ModelConfig config) : config_(completed(std::move(config))) {}

at::Tensor Model::logits_of(const at::Tensor& hidden) const {
  return nn::linear_product(hidden, head_weight());
}

nn::LossSum Model::loss_of(at::Tensor hidden, const at::Tensor& targets,
                           std::optional<double> scale) const {
  const int64_t columns = most_columns_ > 0 ? most_columns_ : config_.vocab;
  return nn::head_loss({head_weight(), loss_, columns}, std::move(hidden),
                       targets, scale);
}

at::Tensor Model::forward_units(const at::Tensor& ids, nn::Balance* balance) {
  at::Tensor x = ids;
  const Tokens tokens{.length = ids.size(1),
                      .load = std::make_shared<nn::BatchLoad>()};
  for (int64_t unit = 0; unit < num_units(); ++unit) {
    if (!is_ahead(unit)) x = forward_unit(unit, x, tokens, balance);
  }
  if (balance) nn::settle(*balance, *tokens.load);
  return x;
}

at::Tensor Model::forward(const at::Tensor& ids, nn::Balance* balance) {
  return logits_of(forward_units(ids, balance));
}

nn::LossSum Model::loss(const at::Tensor& ids, const at::Tensor& targets,
                        nn::Balance* balance) {
  return loss_of(forward_units(ids, balance), targets);
}

at::Tensor Model::forward_cached(const at::Tensor& ids, Cache& cache) {
  const at::NoGradGuard no_grad;
  const int64_t begin = cache.length();
  at::Tensor x = ids;
  for (int64_t unit = 0; unit < num_units(); ++unit) {
    x = forward_unit_cached(unit, x, begin, cache);
  }
  return x;
}

Cache Model::make_cache(int64_t capacity) const {
  return {std::vector<nn::KvCache>(config_.layers,
                                   nn::KvCache{.capacity = capacity})};
}

void Model::set_sequence_shard(int64_t rank, int64_t size) {
  sequence_rank_ = rank;
  sequence_size_ = size;
}

void Model::set_pieces(std::vector<int64_t> pieces) {
  pieces_ = std::move(pieces);
}

void Model::assign(torch::nn::Module& module,
                   const std::vector<int64_t>& units) {
  for (const auto& parameter : nn::parameters_of(module)) {
    parameter.spec->units = units;
  }
}

nn::Positions Model::runs_of(int64_t begin, int64_t tokens) const {
  const int64_t length = tokens / static_cast<int64_t>(pieces_.size());
  nn::Positions runs;
  for (int64_t piece : pieces_) {
    runs.emplace_back(begin + piece * length, length);
    TS_CHECK_CONFIG(runs.back().first + length <= config_.max_seq,
                    "model: a sequence of ", runs.back().first + length,
                    " tokens is longer than model.max_seq ", config_.max_seq,
                    ".");
  }
  return runs;
}

nn::Positions Model::runs_here(int64_t begin, int64_t tokens) const {
  const int64_t length = tokens / sequence_size_;
  return nn::part_of(runs_of(begin, tokens), sequence_rank_ * length, length);
}

int64_t Model::owner_of(const nn::ParameterSpec& spec) const {
  const int64_t unit = spec.units.front();
  return spec.role.of_experts ? num_units() + unit - 1 : unit;
}

std::shared_ptr<Model> make_model(const ModelConfig& config) {
  return std::make_shared<Decoder>(config);
}

ParameterCount count_parameters(const ModelConfig& config) {
  const auto model = make_model(config);
  ParameterCount count;
  for (const auto& parameter : nn::parameters_of(*model)) {
    count.all += parameter.spec->layout.global_numel();
    count.active += active_of(*parameter.spec, model->config());
  }
  return count;
}

std::string describe(const ModelConfig& config) {
  const ParameterCount count = count_parameters(config);
  const std::string text =
      c10::str(config.family, ", ", count_text(static_cast<double>(count.all)),
               " parameters");
  if (count.active == count.all) return text;
  return c10::str(text, ", ", count_text(static_cast<double>(count.active)),
                  " of them active");
}

int64_t flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const auto model = make_model(config);
  const ModelConfig& full = model->config();
  // Forward and the input's gradient take two each a weight, and its own
  // gradient two, where it has one.
  const auto flops_of = [](bool is_frozen) { return is_frozen ? 4 : 6; };
  // The head goes over the tokens once for each depth.
  const int64_t heads = full.mtp.layers + (full.tie_embeddings ? 1 : 0);
  int64_t flops =
      heads * flops_of(full.lora.rank > 0) * full.vocab * full.hidden;
  for (const auto& parameter : nn::parameters_of(*model)) {
    const auto& layout = parameter.spec->layout;
    const bool is_weight = layout.global_shape().size() >= 2;
    const bool is_lookup = parameter.spec->units.front() == 0;
    if (!is_weight || is_lookup) continue;
    flops +=
        flops_of(parameter.spec->is_frozen) * active_of(*parameter.spec, full);
  }
  const int64_t widths = full.head_dim + full.value_dim();
  int64_t keys = 0;  // of a token, in all layers
  for (int64_t layer = 0; layer < full.num_blocks(); ++layer) {
    const int64_t window = full.window_of(layer);
    keys += window > 0 ? std::min(window, seq_len) : seq_len;
  }
  return flops + 6 * full.heads * widths * keys;
}

}  // namespace tessera::models
