// nn/moe.cpp on a tape.
#include <algorithm>
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
        ops_.linear(tokens, local_.width, local_.experts, /*bias=*/false);
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
  if (local_.ep.size == 1) {
    rows = run_local(rows);
  } else {
    const int64_t bytes = 8 * local_.ep.size * local_.experts;
    const Memory all = this->bytes(bytes);
    ops_.tape().collective("all_gather", local_.ep.axes, bytes);
    rows = ops_.all_to_all(rows, rows.numel, local_.ep, /*copied_back=*/false);
    rows = run_local(rows);
    rows = ops_.all_to_all(rows, rows.numel, local_.ep, /*copied_back=*/false);
  }
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

// Rows are sorted by expert, run, and put back.
Traced UnitTracer::run_local(const Traced& rows) const {
  const int64_t width = local_.width, count = rows.numel / width;
  const int64_t here = local_.experts / local_.ep.size;
  const Memory expert = numbers(count), order = numbers(count);
  const Traced sorted = ops_.index_select(rows, rows.numel, order);
  std::vector<Traced> outputs;
  for (int64_t e = 0; e < here; ++e) {
    const int64_t numel = (count / here + (e < count % here ? 1 : 0)) * width;
    // Its gradient is one of all rows, with zeros for the others.
    const Traced own = ops_.tape().record(
        sorted.memory, numel, {sorted}, {},
        [this, all = rows.numel](const Memory& gradient)
            -> std::vector<Memory> { return {ops_.elements(all)}; });
    outputs.push_back(feed_forward(own, local_.expert_ffn, /*whole=*/true));
  }
  const Traced together =
      ops_.tape().record(ops_.elements(rows.numel), rows.numel, outputs, {},
                         [here](const Memory& gradient) {
                           return std::vector<Memory>(here, gradient);
                         });
  return ops_.index_select(together, rows.numel, numbers(count));
}

}  // namespace tessera::models::detail
