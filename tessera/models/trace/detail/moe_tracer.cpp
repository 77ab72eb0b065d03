// nn/moe.cpp on a tape.
#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/mesh/layout.h"
#include "tessera/models/trace/detail/unit_tracer.h"
#include "tessera/nn/router.h"

namespace tessera::models::trace::detail {
namespace {

constexpr int64_t kNumberBytes = 8;

}  // namespace

Traced UnitTracer::moe(const Traced& input) {
  const ExpertShard& shard = model_.expert_shard;
  Traced x = enter(shard.region, input);
  x.again_beside = -1;  // a view of it is what products and gathers take
  const TokenPiece piece = piece_of_tokens(x);
  const bool splits = shard.split.size > 1;
  if (splits) x = ops_.split_with_all_gather(x, piece, shard.split);
  Routing routing = route(x);
  keep_choices(routing, piece);
  add_balance(routing);
  count_load(routing);
  std::optional<Traced> shared;
  const auto run_shared = [&] {
    if (config_.moe.shared_experts == 0 || shared) return;
    shared = mlp(input, "shared", model_.shared_ffn);
  };
  Traced y = mix(x, routing, run_shared);
  if (splits) y = ops_.all_gather_with_split(y, piece, shard.split);
  y = leave(shard.region, y);
  run_shared();
  return shared ? ops_.add(y, *shared) : y;
}

TokenPiece UnitTracer::piece_of_tokens(const Traced& x) const {
  const ExpertShard& shard = model_.expert_shard;
  const int64_t whole = x.numel / config_.hidden / model_.samples;
  const auto size = [&](int64_t rank) {
    return mesh::chunk_of(whole, shard.split.size, rank).size();
  };
  return {model_.samples, config_.hidden, whole, size(shard.split_rank),
          size(0)};
}

// What the gate makes of its tokens, and in fp32 of those of narrower types.
Traced UnitTracer::gate(const Traced& tokens) const {
  const int64_t width = config_.hidden, experts = config_.moe.experts;
  const int64_t n = tokens.numel / width, all = n * experts;
  if (ops_.element() == ops_.wide()) {
    return ops_.linear(tokens, n, width, experts, /*bias=*/false);
  }
  const program::Flops product{.matmul = 2 * all * width};
  Tape& tape = ops_.tape();
  tape.forward_flops(product);
  tape.products.push_back({.rows = n,
                           .in = width,
                           .out = experts,
                           .weight_gradient = !tape.is_frozen()});
  const Memory z = ops_.wides(all);
  {
    const Memory x = ops_.wides(n * width), w = ops_.wides(width * experts);
  }
  return tape.record(z, all, {tokens, tape.parameter(width * experts)},
                     {tokens.memory},
                     [=, this](const Memory& gradient) -> std::vector<Memory> {
                       ops_.tape().input_flops(product);
                       Memory dx;
                       {
                         const Memory w = ops_.wides(width * experts);
                         const Memory wide = ops_.wides(n * width);
                         dx = ops_.elements(n * width);
                       }
                       if (ops_.tape().is_frozen())
                         return {std::move(dx), nullptr};
                       ops_.tape().weight_flops(product);
                       const Memory x = ops_.wides(n * width);
                       const Memory wide = ops_.wides(width * experts);
                       return {std::move(dx), ops_.elements(width * experts)};
                     });
}

// Products, with normal numbers times the softplus of others.
Traced UnitTracer::noisy(const Traced& products, const Traced& tokens) const {
  const int64_t all = products.numel;
  const auto like_it = [this, all](const Memory&) -> std::vector<Memory> {
    return {ops_.wides(all)};
  };
  const Memory normal = ops_.wides(all);
  const Traced of_noise = gate(tokens);
  const Traced size = ops_.tape().record(ops_.wides(all), all, {of_noise},
                                         {of_noise.memory}, like_it);
  const Traced noise =
      ops_.tape().record(ops_.wides(all), all, {size}, {normal}, like_it);
  return ops_.tape().record(ops_.wides(all), all, {products, noise}, {},
                            [](const Memory& gradient) -> std::vector<Memory> {
                              return {gradient, gradient};
                            });
}

UnitTracer::Routing UnitTracer::route(const Traced& tokens) const {
  const MoeConfig& moe = config_.moe;
  const int64_t n = tokens.numel / config_.hidden, k = moe.top_k;
  const int64_t all = n * moe.experts;
  const bool is_softmax = moe.score != "sigmoid";
  Routing routing;
  Traced scores;
  {
    routing.products = gate(tokens);
    if (moe.noise) routing.products = noisy(routing.products, tokens);
    const Memory p = ops_.wides(all);
    scores = ops_.tape().record(
        p, all, {routing.products}, {p},
        [this, all](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.wides(all)};
        });
    if (moe.z_loss == 0) routing.products = {};
  }
  // Of sigmoids, divided by their sum.
  routing.probabilities =
      is_softmax ? scores : over_sum(scores, n, moe.experts);
  if (moe.experts_choose()) {
    routing.weights = scores;
    if (moe.scale != 1) {
      routing.weights = ops_.tape().record(
          ops_.wides(all), all, {scores}, {},
          [this, all](const Memory& gradient) -> std::vector<Memory> {
            return {ops_.wides(all)};
          });
    }
    return routing;
  }
  if (!config_.has_score_bias() && moe.groups == 1) {
    const Memory chosen = ops_.wides(n * k);
    routing.experts = ops_.numbers(n * k);
    routing.weights = ops_.tape().record(
        chosen, n * k, {scores}, {routing.experts},
        [this, all](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.wides(all)};
        });
  } else {
    {
      const Memory choice = ops_.wides(all);
      const Memory masked = moe.groups > 1 ? ops_.wides(all) : nullptr;
      const Memory best = ops_.wides(n * k);
      routing.experts = ops_.numbers(n * k);
    }
    routing.weights = ops_.tape().record(
        ops_.wides(n * k), n * k, {scores}, {routing.experts},
        [this, all](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.wides(all)};
        });
  }
  if (moe.normalize) routing.weights = over_sum(routing.weights, n, k);
  if (moe.scale != 1) {
    routing.weights = ops_.tape().record(
        ops_.wides(n * k), n * k, {routing.weights}, {},
        [this, n, k](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.wides(n * k)};
        });
  }
  return routing;
}

Traced UnitTracer::over_sum(const Traced& x, int64_t rows, int64_t k) const {
  const Memory sum = ops_.wides(rows);
  return ops_.tape().record(
      ops_.wides(rows * k), rows * k, {x}, {x.memory, sum},
      [this, rows, k](const Memory& gradient) -> std::vector<Memory> {
        Memory of_x = ops_.wides(rows * k);
        const Memory of_sum = ops_.wides(2 * rows * k + rows);
        return {std::move(of_x)};
      });
}

// Choices of a sample's tokens, or experts' scores of them, in the order of
// positions, and which are within the capacity.
void UnitTracer::keep_choices(Routing& routing, const TokenPiece& piece) const {
  const MoeConfig& moe = config_.moe;
  if (moe.capacity_factor == 0) return;
  const ExpertShard& shard = model_.expert_shard;
  const bool experts_choose = moe.experts_choose();
  const int64_t slots = experts_choose ? moe.experts : moe.top_k;
  const int64_t all = piece.samples * piece.most * slots * shard.sample_parts;
  const int64_t placed = all / slots * (slots + 1);
  const int64_t size = experts_choose ? ops_.wide() : kNumberBytes;
  if (shard.gather_samples) shard.gather_samples(ops_, placed * size);
  if (experts_choose) {
    const Memory gathered = ops_.wides(placed + all);
    const Memory rounded = ops_.wides(all), best = ops_.wides(all);
    const Memory order = ops_.numbers(all);
    const Memory taken = ops_.bytes(2 * all);
    routing.experts = ops_.numbers(routing.weights.numel);
    return;
  }
  const Memory gathered = ops_.numbers(2 * placed);
  const Memory keys = ops_.numbers(all), order = ops_.numbers(all);
  const Memory places = ops_.numbers(3 * all), kept = ops_.bytes(2 * all);
  routing.kept = ops_.bytes(routing.weights.numel);
}

// Of an expert, in tokens of a sample.
int64_t UnitTracer::capacity() const {
  const MoeConfig& moe = config_.moe;
  return nn::room_of(moe.capacity_factor, model_.whole_tokens, moe.top_k,
                     moe.experts);
}

// Room for those that so many tokens give, and how many these are.
UnitTracer::Rows UnitTracer::rows_of(int64_t tokens) const {
  const MoeConfig& moe = config_.moe;
  if (!moe.experts_choose()) return {tokens * moe.top_k, tokens * moe.top_k};
  const int64_t of_sample = std::min(tokens / model_.samples, capacity());
  return {moe.experts * model_.samples * of_sample,
          moe.experts * model_.samples * capacity() /
              model_.expert_shard.sample_parts};
}

void UnitTracer::add_balance(const Routing& routing) {
  Tape& tape = ops_.tape();
  if (!tape.records()) return;
  const MoeConfig& moe = config_.moe;
  const int64_t all = routing.probabilities.numel;
  const ExpertShard& shard = model_.expert_shard;
  const bool of_samples = moe.balance == "sample";
  const bool of_batch = moe.balance == "batch";  // by expert, until all ran
  const int64_t cells = (of_samples ? model_.samples : 1) * moe.experts;
  Memory rows = ops_.wides(cells);
  {
    const Memory entropy = ops_.wides(all);
  }
  load_ = ops_.numbers(config_.layers_with_experts() * (moe.experts + 2));
  const auto& sum = of_samples ? shard.sum_samples : shard.sum_batch;
  if (sum) sum(ops_, cells);
  if (!of_samples) rows = ops_.wides(cells);  // their shares
  balance_ = {};
  if (moe.aux_loss > 0 && !moe.experts_choose()) {
    balance_ = tape.record(
        ops_.wides(of_batch ? moe.experts : 1), 1, {routing.probabilities},
        {rows}, [this, all](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.wides(all)};
        });
  }
  if (moe.z_loss == 0) return;
  const int64_t n = all / moe.experts;
  const Memory z = ops_.wides(n);
  std::vector<Traced> inputs = {routing.products};
  if (balance_.node != nullptr) inputs.push_back(balance_);
  balance_ =
      tape.record(ops_.wides(1), 1, inputs, {routing.products.memory, z},
                  [this, all, count = inputs.size()](const Memory& gradient) {
                    std::vector<Memory> gradients = {ops_.wides(all)};
                    gradients.resize(count, gradient);
                    return gradients;
                  });
}

// The gradient of the bias is known beforehand.
void UnitTracer::count_load(Routing& routing) const {
  if (!config_.moe.bias_balance || !ops_.tape().records()) return;
  const int64_t experts = config_.moe.experts;
  const Memory excess = ops_.wides(experts);
  routing.weights = ops_.tape().record(
      routing.weights.memory, routing.weights.numel,
      {routing.weights, ops_.tape().parameter(experts)}, {excess},
      [excess](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, excess};
      });
}

Traced UnitTracer::mix(const Traced& tokens, const Routing& routing,
                       const std::function<void()>& beside) const {
  const int64_t width = config_.hidden, n = tokens.numel / width;
  const ExpertShard& shard = model_.expert_shard;
  const MoeConfig& moe = config_.moe;
  const int64_t slots = moe.experts_choose() ? moe.experts : moe.top_k;
  const int64_t placed = n * slots;
  const auto [room, sent] = rows_of(n);
  const Memory sorted = ops_.numbers(placed), token = ops_.numbers(room);
  const Memory row = ops_.numbers(n * slots);
  Traced rows = ops_.index_select(tokens, room * width, row);
  if (sent < room) {
    rows = ops_.tape().record(
        rows.memory, sent * width, {rows}, {},
        [this, all = room * width](const Memory&) -> std::vector<Memory> {
          return {ops_.elements(all)};
        });
  }
  const Memory counts = ops_.numbers(config_.moe.experts);
  const RunExperts run = [this](const Traced& here, int64_t experts) {
    return run_experts(here, experts);
  };
  rows = shard.dispatch ? shard.dispatch(ops_, rows, run, beside)
                        : run(rows, model_.experts);
  return ops_.tape().record(
      ops_.elements(tokens.numel), tokens.numel, {rows, routing.weights},
      {rows.memory, routing.weights.memory, row},
      [this, numel = rows.numel,
       all = n * slots](const Memory& gradient) -> std::vector<Memory> {
        return {ops_.elements(numel), ops_.wides(all)};
      });
}

// Of so many of those here, whose rows come one expert's after the other's.
Traced UnitTracer::run_experts(const Traced& rows, int64_t experts) const {
  const int64_t width = config_.hidden, ffn = model_.expert_ffn;
  const auto product = [&](const Traced& x, int64_t in, int64_t out) {
    return ops_.grouped_linear(x, rows.numel / width, in, out, experts);
  };
  const Traced up = product(rows, width, ffn);
  if (!nn::has_gate(family_.mlp)) {
    return product(ops_.gelu(up), ffn, width);
  }
  const Traced gate = product(rows, width, ffn);
  return product(ops_.glu(gate, up), ffn, width);
}

}  // namespace tessera::models::trace::detail
