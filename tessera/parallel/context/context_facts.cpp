#include "tessera/parallel/context/context_facts.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "tessera/parallel/context/context_parallel.h"

namespace tessera::parallel::context {
namespace {

using mesh::Axis;
using models::trace::HeadShape;
using models::trace::Memory;
using models::trace::Operators;
using models::trace::Ranks;
using models::trace::Traced;

// The ranks along cp, and this one's number.
struct Place {
  Ranks ranks;
  int64_t rank = 0;
  bool documents = false;
};

// Each piece of queries over those of keys that it sees.
std::vector<HeadShape> pairs_seen(const HeadShape& shape, const Pieces& queries,
                                  const Pieces& keys) {
  HeadShape pair = shape;
  const int64_t length = shape.q_tokens / std::ssize(queries);
  pair.q_tokens = pair.kv_tokens = length;
  std::vector<HeadShape> pairs;
  for (const int64_t q : queries) {
    for (const int64_t k : keys) {
      if (k > q) continue;
      const nn::Within seen = nn::within_window(
          {q * length, length}, {k * length, length}, shape.window);
      if (seen == nn::Within::kNone) continue;
      pair.behind = (q - k) * length;
      pair.window = seen == nn::Within::kPart ? shape.window : 0;
      pairs.push_back(pair);
    }
  }
  return pairs;
}

// ring_attention: keys and values go round, and in the backward their gradients
// with them. O(cp).
Traced ring(const Operators& ops, const Place& place, const Traced& q,
            const Traced& k, const Traced& v, const HeadShape& shape) {
  const int64_t n = place.ranks.size, rank = place.rank;
  const int64_t kv = 2 * shape.kv_numel();
  const auto pairs_at = [rank, n, shape](int64_t step) {
    return pairs_seen(shape, pieces_of(rank, n),
                      pieces_of((rank - step + n) % n, n));
  };
  const auto message = [&ops, ranks = place.ranks](int64_t bytes) {
    ops.tape().collective("send", ranks.axes, bytes);
    ops.tape().collective("recv", ranks.axes, bytes);
    return ops.tape().allocate(bytes);
  };
  const Memory own = ops.elements(kv);
  Memory there, sum, lse;
  for (int64_t step = 0; step < n; ++step) {
    const bool last = step + 1 == n;
    Memory received = last ? nullptr : message(kv * ops.element());
    if (step == 0) {
      sum = ops.wides(shape.q_numel());
      lse = ops.wides(shape.lse_numel());
    }
    for (const HeadShape& pair : pairs_at(step)) {
      ops.attend(pair, /*merges=*/true);
    }
    if (!last) there = std::move(received);
  }
  const Memory out = ops.narrowed(sum, shape.q_numel());
  return ops.tape().record(
      out, shape.q_numel(), {q, k, v}, {q.memory, own, out, lse},
      [=, &ops](const Memory& gradient) -> std::vector<Memory> {
        Memory there, sums = ops.wides(kv), of_step;
        const Memory dq = ops.wides(shape.q_numel());
        for (int64_t step = 0; step < n; ++step) {
          const bool last = step + 1 == n;
          Memory received = last ? nullptr : message(kv * ops.element());
          of_step = sums;
          for (const HeadShape& pair : pairs_at(step)) {
            ops.attend_backward(pair);
          }
          if (!last) there = std::move(received);
          Memory home = message(kv * ops.wide());
          sums = std::move(home);
        }
        return {ops.narrowed(dq, shape.q_numel()), ops.narrowed(sums, kv / 2),
                ops.narrowed(sums, kv / 2)};
      });
}

Traced gathered(const Operators& ops, const Place& place, const Traced& q,
                const Traced& k, const Traced& v, const HeadShape& shape) {
  const int64_t n = place.ranks.size;
  const auto pairs =
      pairs_seen(shape, pieces_of(place.rank, n), pieces_of_all(n));
  const Traced all_v = ops.all_gather_with_reduce_scatter(v, place.ranks);
  const Traced all_k = ops.all_gather_with_reduce_scatter(k, place.ranks);
  return ops.piece_attention(q, all_k, all_v, pairs);
}

// All tokens of a part of the heads.
Traced to_heads(const Operators& ops, const Traced& x, const Ranks& ranks,
                bool batched) {
  const Traced pieces = [&] {
    const Traced rows = ops.all_to_all(ops.reorder(x, /*copied_back=*/true),
                                       x.numel, ranks, /*copied_back=*/false);
    return batched ? ops.reorder(rows, /*copied_back=*/true) : rows;
  }();
  return ops.index_select(pieces, x.numel, nullptr);
}

Traced to_tokens(const Operators& ops, const Traced& x, const Ranks& ranks,
                 bool batched) {
  const Traced by_rank = ops.index_select(x, x.numel, nullptr);
  return ops.reorder(
      ops.all_to_all(
          batched ? ops.reorder(by_rank, /*copied_back=*/true) : by_rank,
          x.numel, ranks, /*copied_back=*/true),
      /*copied_back=*/false);
}

Traced ulysses(const Operators& ops, const Place& place, const Traced& q,
               const Traced& k, const Traced& v, const HeadShape& shape) {
  const int64_t c = place.ranks.size;
  const bool batched = shape.samples > 1;
  const auto whole = [&](const Traced& x) {
    return to_heads(ops, x, place.ranks, batched);
  };
  const int64_t repeats = std::max<int64_t>(1, c / shape.kv_heads);
  const auto of_kv = [&](const Traced& x) {
    if (repeats == 1) return whole(x);
    const int64_t wide = x.numel * repeats;
    return whole(ops.tape().record(
        ops.elements(wide), wide, {x}, {},
        [&ops, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
          return {ops.elements(numel)};
        }));
  };
  const Traced all_q = whole(q);
  const Traced all_k = of_kv(k), all_v = of_kv(v);
  HeadShape all = shape;
  all.q_tokens = all.kv_tokens = c * shape.q_tokens;
  all.heads /= c;
  all.kv_heads = std::max<int64_t>(1, all.kv_heads / c);
  return to_tokens(ops,
                   ops.attention(all_q, all_k, all_v, all, place.documents),
                   place.ranks, batched);
}

}  // namespace

void apply(models::trace::TracedModel& model, const mesh::DeviceMesh& mesh,
           const mesh::Coord& coord, const ContextConfig& config) {
  const Place place{models::trace::along(mesh, {Axis::kCp}), coord[Axis::kCp],
                    model.documents};
  model.tokens /= place.ranks.size;
  model.pieces = pieces_of(place.rank, place.ranks.size);
  const auto attention = config.method == "ulysses"     ? ulysses
                         : config.method == "allgather" ? gathered
                                                        : ring;
  model.attention = [attention, place](const Operators& ops, const Traced& q,
                                       const Traced& k, const Traced& v,
                                       const HeadShape& shape) {
    return attention(ops, place, q, k, v, shape);
  };
}

}  // namespace tessera::parallel::context
