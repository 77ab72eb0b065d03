// nn/moe.cpp on a tape.
#include <utility>

#include "tessera/mesh/layout.h"
#include "tessera/models/trace/detail/unit_tracer.h"

namespace tessera::models::trace::detail {

Traced UnitTracer::moe(const Traced& input) {
  const Region& region = model_.expert_shard.region;
  Traced x = enter(region, input);
  x.again_beside = -1;  // a view of it is what products and gathers take
  const Routing routing = route(x);
  add_balance(routing);
  return leave(region, mix(x, routing));
}

UnitTracer::Routing UnitTracer::route(const Traced& tokens) const {
  const int64_t n = tokens.numel / config_.hidden, k = config_.moe.top_k;
  const int64_t all = n * config_.moe.experts;
  Traced probabilities;
  {
    const Traced scores = ops_.linear(tokens, n, config_.hidden,
                                      config_.moe.experts, /*bias=*/false);
    const bool narrow = ops_.element() < ops_.wide();
    const Memory widened = narrow ? ops_.wides(all) : nullptr;
    const Memory p = ops_.wides(all);
    probabilities = ops_.tape().record(
        p, all, {scores}, {p},
        [this, all, narrow](const Memory& gradient) -> std::vector<Memory> {
          Memory sum = ops_.wides(all);
          return {narrow ? ops_.elements(all) : std::move(sum)};
        });
  }
  const Memory picked = ops_.wides(n * k), experts = ops_.numbers(n * k);
  const Traced best = ops_.tape().record(
      picked, n * k, {probabilities}, {experts},
      [this, all](const Memory& gradient) -> std::vector<Memory> {
        return {ops_.wides(all)};
      });
  const Memory sum = ops_.wides(n);
  const Traced weights = ops_.tape().record(
      ops_.wides(n * k), n * k, {best}, {best.memory, sum},
      [this, n, k](const Memory& gradient) -> std::vector<Memory> {
        Memory of_best = ops_.wides(n * k);
        const Memory of_sum = ops_.wides(2 * n * k + n);
        return {std::move(of_best)};
      });
  return {probabilities, experts, weights};
}

void UnitTracer::add_balance(const Routing& routing) {
  if (!ops_.tape().records()) return;
  const int64_t cells = model_.samples * config_.moe.experts;
  const Memory rows = ops_.wides(cells);
  load_ = ops_.numbers(config_.moe.experts);
  const auto& sum_samples = model_.expert_shard.sum_samples;
  if (sum_samples) sum_samples(ops_, cells);
  balance_ = ops_.tape().record(
      ops_.wides(1), 1, {routing.probabilities}, {rows},
      [this, all = routing.probabilities.numel](const Memory& gradient)
          -> std::vector<Memory> { return {ops_.wides(all)}; });
}

Traced UnitTracer::mix(const Traced& tokens, const Routing& routing) const {
  const int64_t width = config_.hidden, n = tokens.numel / width;
  const ExpertShard& shard = model_.expert_shard;
  const int64_t share = shard.shares_tokens
                            ? mesh::chunk_of(n, shard.copies, shard.copy).size()
                            : n;
  const int64_t k = config_.moe.top_k, sent = share * k;
  const Memory order = ops_.numbers(sent), token = ops_.numbers(sent);
  Traced rows = ops_.index_select(tokens, sent * width, token);
  const Memory counts = ops_.numbers(config_.moe.experts);
  const RunExperts run = [this](const Traced& here) {
    return run_experts(here);
  };
  rows = shard.dispatch ? shard.dispatch(ops_, rows, run) : run(rows);
  // The weight of each row, and back to a place of zeros for each token.
  const Traced weights = ops_.tape().record(
      ops_.wides(sent), sent, {routing.weights}, {order},
      [this, all = n * k, sent](const Memory& gradient) -> std::vector<Memory> {
        const Memory of_share = ops_.wides(sent);
        return {ops_.wides(all)};
      });
  const Traced weighted =
      ops_.tape().record(ops_.elements(rows.numel), rows.numel, {rows, weights},
                         {rows.memory, weights.memory},
                         [this, numel = rows.numel,
                          sent](const Memory& gradient) -> std::vector<Memory> {
                           Memory of_rows = ops_.elements(numel);
                           const Memory products = ops_.elements(numel);
                           return {std::move(of_rows), ops_.wides(sent)};
                         });
  const Memory zeros = ops_.elements(tokens.numel);
  return ops_.tape().record(ops_.elements(tokens.numel), tokens.numel,
                            {weighted}, {token, weighted.memory},
                            [this, numel = rows.numel](
                                const Memory& gradient) -> std::vector<Memory> {
                              return {ops_.elements(numel)};
                            });
}

// Of those that are here, whose rows come one expert's after the other's.
Traced UnitTracer::run_experts(const Traced& rows) const {
  const int64_t width = config_.hidden, ffn = model_.expert_ffn;
  const auto product = [&](const Traced& x, int64_t in, int64_t out) {
    return ops_.grouped_linear(x, rows.numel / width, in, out, model_.experts);
  };
  const Traced up = product(rows, width, ffn);
  if (family_.mlp == nn::MlpKind::kGelu) {
    return product(ops_.gelu(up), ffn, width);
  }
  const Traced gate = product(rows, width, ffn);
  return product(ops_.swiglu(gate, up), ffn, width);
}

}  // namespace tessera::models::trace::detail
