// nn/moe.cpp and parallel/expert/dispatch.cpp on a tape.
#include <utility>

#include "tessera/mesh/layout.h"
#include "tessera/models/detail/unit_tracer.h"

namespace tessera::models::detail {

Traced UnitTracer::moe(const Traced& input) {
  const bool region = local_.expert_region;
  const Traced x = region ? enter(input) : input;
  const Routing routing = route(x);
  add_balance(routing);
  const Traced y = mix(x, routing);
  return region ? leave(y) : y;
}

UnitTracer::Routing UnitTracer::route(const Traced& tokens) const {
  const int64_t n = tokens.numel / local_.width, k = local_.top_k;
  const int64_t all = n * local_.experts;
  Traced probabilities;
  {
    const Traced scores =
        ops_.linear(tokens, n, local_.width, local_.experts, /*bias=*/false);
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
  const Memory picked = ops_.wides(n * k), experts = numbers(n * k);
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
  const int64_t cells = local_.samples * local_.experts;
  const Memory rows = ops_.wides(cells);
  load_ = numbers(local_.experts);
  if (local_.samples_of.size > 1) {
    ops_.tape().collective("all_reduce", local_.samples_of.axes,
                           cells * ops_.wide());
  }
  balance_ = ops_.tape().record(
      ops_.wides(1), 1, {routing.probabilities}, {rows},
      [this, all = routing.probabilities.numel](const Memory& gradient)
          -> std::vector<Memory> { return {ops_.wides(all)}; });
}

Traced UnitTracer::mix(const Traced& tokens, const Routing& routing) const {
  const int64_t width = local_.width, n = tokens.numel / width;
  const int64_t shares = local_.shares_tokens ? local_.copies : 1;
  const int64_t share =
      mesh::chunk_of(n, shares, local_.shares_tokens ? local_.tp_coord : 0)
          .size();
  const int64_t k = local_.top_k, sent = share * k;
  const Memory order = numbers(sent), token = numbers(sent);
  Traced rows = ops_.index_select(tokens, sent * width, token);
  const Memory counts = numbers(local_.experts);
  rows = local_.ep.size == 1 ? run_experts(rows) : dispatch(rows);
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

// To the ranks that have the experts, and home; rows come by source, are sorted
// by expert, and put back.
Traced UnitTracer::dispatch(const Traced& rows) const {
  const int64_t count = rows.numel / local_.width;
  const int64_t all_bytes = 8 * local_.ep.size * local_.experts;
  const Memory all = bytes(all_bytes);
  ops_.tape().collective("all_gather", local_.ep.axes, all_bytes);
  const Traced came =
      ops_.all_to_all(rows, rows.numel, local_.ep, /*copied_back=*/false);
  const Memory order = numbers(count);
  const Traced sorted = ops_.index_select(came, rows.numel, order);
  const Traced outputs = run_experts(sorted);
  return ops_.all_to_all(ops_.index_select(outputs, rows.numel, numbers(count)),
                         rows.numel, local_.ep, /*copied_back=*/false);
}

// Of those that are here, whose rows come one expert's after the other's.
Traced UnitTracer::run_experts(const Traced& rows) const {
  const int64_t experts = local_.experts / local_.ep.size;
  const int64_t count = rows.numel / local_.width;
  return feed_forward(
      rows, local_.expert_ffn,
      [&](const Traced& x, int64_t in, int64_t out) {
        return ops_.grouped_linear(x, count, in, out, experts);
      },
      [&](const Traced& x, int64_t in, int64_t out) {
        return ops_.grouped_linear(x, count, in, out, experts);
      });
}

}  // namespace tessera::models::detail
