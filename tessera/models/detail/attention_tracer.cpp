#include <algorithm>
#include <utility>

#include "tessera/models/detail/unit_tracer.h"

namespace tessera::models::detail {
namespace {

// How many pieces of keys those of queries see: a rank of context parallelism
// has the pieces r and 2 c - 1 - r of 2 c.
int64_t pairs_seen(int64_t rank, int64_t other, int64_t degree) {
  int64_t pairs = 0;
  for (int64_t q : {rank, 2 * degree - 1 - rank}) {
    for (int64_t k : {other, 2 * degree - 1 - other}) pairs += k <= q ? 1 : 0;
  }
  return pairs;
}

// One piece of queries over one of keys.
HeadShape piece_of(HeadShape shape) {
  shape.q_tokens /= 2;
  shape.kv_tokens = shape.q_tokens;
  return shape;
}

// parallel/context/block_attention: `attend` of one pair, behind which nothing
// of it is left.
void attend(const Operators& ops, const HeadShape& piece) {
  const auto seen = ops.flash(piece);
  const Memory merged = ops.wides(piece.lse_numel());
  const Memory scale = ops.wides(piece.lse_numel());
  const Memory product = ops.wides(piece.q_numel());
}

// What has the type of the sums is handed on as it is.
Memory narrowed(const Operators& ops, const Memory& sum, int64_t numel) {
  return ops.element() == ops.wide() ? sum : ops.elements(numel);
}

}  // namespace

// The angles of a rank whose tokens are not one run; else they are a part of
// what all share.
Memory UnitTracer::rotation() const {
  if (local_.positions > 0 || local_.cp.size == 1) return nullptr;
  return ops_.wides(local_.tokens * local_.head_width);
}

HeadShape UnitTracer::heads_here() const {
  return {.samples = local_.samples,
          .q_tokens = local_.tokens,
          .kv_tokens = local_.tokens,
          .heads = local_.heads,
          .kv_heads = local_.kv_heads,
          .width = local_.head_width};
}

Traced UnitTracer::attention(const Traced& input) const {
  const Traced x = enter(input);
  const int64_t width = local_.width;
  const int64_t q_width = local_.heads * local_.head_width;
  const int64_t kv_width = local_.kv_heads * local_.head_width;
  const Family& family = *local_.family;
  const int64_t tokens = x.numel / width;
  Traced q = ops_.linear(x, tokens, width, q_width, family.qkv_bias);
  Traced k = ops_.linear(x, tokens, width, kv_width, family.qkv_bias);
  const Traced v = ops_.linear(x, tokens, width, kv_width, family.qkv_bias);
  if (family.qk_norm == nn::QkNorm::kAllHeads) {
    q = norm_of_heads(q, q_width);
    k = norm_of_heads(k, kv_width);
  }
  if (family.qk_norm == nn::QkNorm::kPerHead) {
    q = ops_.rms_norm(q, local_.head_width);
    k = ops_.rms_norm(k, local_.head_width);
  }
  if (local_.positions == 0) {
    q = ops_.rotate(q, rotation_);
    k = ops_.rotate(k, rotation_);
  }
  return rows(core(q, k, v), q_width, width, family.out_bias);
}

// nn's SharedRmsNorm.
Traced UnitTracer::norm_of_heads(const Traced& x, int64_t width) const {
  if (local_.tp.size == 1) return ops_.rms_norm(x, width);
  const int64_t numel = x.numel, rows = numel / width;
  const bool narrow = ops_.element() < ops_.wide();
  const auto widened = [=, this](const Memory& of) {
    return narrow ? ops_.wides(numel) : of;
  };
  const auto mean_of_product = [=, this] {
    const Memory product = ops_.wides(numel), means = ops_.wides(rows);
    return mean_over_tp(rows);
  };
  Memory y, inverse_rms;
  {
    const Memory wide = widened(x.memory);
    const Memory squares = mean_of_product();
    inverse_rms = ops_.wides(rows);
    const Memory normed = ops_.wides(numel), scaled = ops_.wides(numel);
    y = narrow ? ops_.elements(numel) : scaled;
  }
  return ops_.tape().record(
      y, numel, {x, ops_.tape().parameter(width)}, {x.memory, inverse_rms},
      [=, this](const Memory& given) -> std::vector<Memory> {
        const Memory gradient = widened(given);
        const Memory normed = ops_.wides(numel), pulled = ops_.wides(numel);
        const Memory pull = mean_of_product();
        Memory dx;
        {
          const Memory back = ops_.wides(numel), rest = ops_.wides(numel);
          const Memory scaled = ops_.wides(numel);
          dx = narrow ? ops_.elements(numel) : scaled;
        }
        const Memory product = ops_.wides(numel), sum = ops_.wides(width);
        return {std::move(dx), narrow ? ops_.elements(width) : sum};
      });
}

// Of one number of each row, out of the region and into it.
Memory UnitTracer::mean_over_tp(int64_t rows) const {
  const auto collective = [&](const char* verb) {
    ops_.tape().collective(verb, local_.tp.axes, rows * ops_.wide());
  };
  const Memory part = ops_.wides(rows);
  Memory sum = ops_.wides(rows);
  if (!local_.sequence_parallel) {
    collective("all_reduce");
    return sum;
  }
  collective("reduce_scatter");
  collective("all_gather");
  return sum;
}

Traced UnitTracer::core(const Traced& q, const Traced& k,
                        const Traced& v) const {
  if (local_.cp.size == 1) return ops_.attention(q, k, v, heads_here());
  if (local_.context_method == "ulysses") return ulysses(q, k, v);
  if (local_.context_method == "allgather") return gathered(q, k, v);
  return ring(q, k, v);
}

// parallel/context/ring_attention: keys and values go round, and in the
// backward their gradients with them.
Traced UnitTracer::ring(const Traced& q, const Traced& k,
                        const Traced& v) const {
  const HeadShape shape = heads_here(), piece = piece_of(shape);
  const int64_t n = local_.cp.size, rank = local_.cp_coord;
  const int64_t kv = 2 * shape.kv_numel();
  const auto pairs_at = [rank, n](int64_t step) {
    return pairs_seen(rank, (rank - step + n) % n, n);
  };
  const auto message = [this](int64_t bytes) {
    ops_.tape().collective("send", local_.cp.axes, bytes);
    ops_.tape().collective("recv", local_.cp.axes, bytes);
    return ops_.tape().allocate(bytes);
  };
  const Memory own = ops_.elements(kv);
  Memory there, sum, lse;
  for (int64_t step = 0; step < n; ++step) {
    const bool last = step + 1 == n;
    Memory received = last ? nullptr : message(kv * ops_.element());
    if (step == 0) {
      sum = ops_.wides(shape.q_numel());
      lse = ops_.wides(shape.lse_numel());
    }
    for (int64_t i = 0; i < pairs_at(step); ++i) attend(ops_, piece);
    if (!last) there = std::move(received);
  }
  const Memory out = narrowed(ops_, sum, shape.q_numel());
  return ops_.tape().record(
      out, shape.q_numel(), {q, k, v}, {q.memory, own, out, lse},
      [=, this](const Memory& gradient) -> std::vector<Memory> {
        Memory there, sums = ops_.wides(kv), of_step;
        const Memory dq = ops_.wides(shape.q_numel());
        for (int64_t step = 0; step < n; ++step) {
          const bool last = step + 1 == n;
          Memory received = last ? nullptr : message(kv * ops_.element());
          of_step = sums;
          for (int64_t i = 0; i < pairs_at(step); ++i) {
            ops_.flash_backward(piece);
          }
          if (!last) there = std::move(received);
          Memory home = message(kv * ops_.wide());
          sums = std::move(home);
        }
        return {narrowed(ops_, dq, shape.q_numel()),
                narrowed(ops_, sums, kv / 2), narrowed(ops_, sums, kv / 2)};
      });
}

Traced UnitTracer::gathered(const Traced& q, const Traced& k,
                            const Traced& v) const {
  const HeadShape shape = heads_here(), piece = piece_of(shape);
  const int64_t n = local_.cp.size;
  int64_t pairs = 0;
  for (int64_t other = 0; other < n; ++other) {
    pairs += pairs_seen(local_.cp_coord, other, n);
  }
  const Traced all_v = ops_.all_gather_with_reduce_scatter(v, local_.cp);
  const Traced all_k = ops_.all_gather_with_reduce_scatter(k, local_.cp);
  const Memory sum = ops_.wides(shape.q_numel());
  const Memory lse = ops_.wides(shape.lse_numel());
  for (int64_t i = 0; i < pairs; ++i) attend(ops_, piece);
  const Memory out = narrowed(ops_, sum, shape.q_numel());
  const int64_t kv = n * shape.kv_numel();
  return ops_.tape().record(
      out, shape.q_numel(), {q, all_k, all_v},
      {q.memory, all_k.memory, all_v.memory, out, lse},
      [=, this](const Memory& gradient) -> std::vector<Memory> {
        const Memory dq = ops_.wides(shape.q_numel());
        const Memory dk = ops_.wides(kv), dv = ops_.wides(kv);
        for (int64_t i = 0; i < pairs; ++i) ops_.flash_backward(piece);
        return {narrowed(ops_, dq, shape.q_numel()), narrowed(ops_, dk, kv),
                narrowed(ops_, dv, kv)};
      });
}

// All tokens of a part of the heads.
Traced UnitTracer::to_heads(const Traced& x) const {
  const bool batched = local_.samples > 1;
  const Traced pieces = [&] {
    const Traced rows =
        ops_.all_to_all(ops_.reorder(x, /*copied_back=*/true), x.numel,
                        local_.cp, /*copied_back=*/false);
    return batched ? ops_.reorder(rows, /*copied_back=*/true) : rows;
  }();
  return ops_.index_select(pieces, x.numel, nullptr);
}

Traced UnitTracer::to_tokens(const Traced& x) const {
  const bool batched = local_.samples > 1;
  const Traced by_rank = ops_.index_select(x, x.numel, nullptr);
  return ops_.reorder(
      ops_.all_to_all(
          batched ? ops_.reorder(by_rank, /*copied_back=*/true) : by_rank,
          x.numel, local_.cp, /*copied_back=*/true),
      /*copied_back=*/false);
}

Traced UnitTracer::ulysses(const Traced& q, const Traced& k,
                           const Traced& v) const {
  HeadShape shape = heads_here();
  const int64_t c = local_.cp.size;
  const int64_t repeats = std::max<int64_t>(1, c / shape.kv_heads);
  const auto of_kv = [&](const Traced& x) {
    if (repeats == 1) return to_heads(x);
    const int64_t wide = x.numel * repeats;
    return to_heads(ops_.tape().record(
        ops_.elements(wide), wide, {x}, {},
        [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.elements(numel)};
        }));
  };
  const Traced all_q = to_heads(q);
  const Traced all_k = of_kv(k), all_v = of_kv(v);
  shape.q_tokens = shape.kv_tokens = c * local_.tokens;
  shape.heads /= c;
  shape.kv_heads = std::max<int64_t>(1, shape.kv_heads / c);
  return to_tokens(ops_.attention(all_q, all_k, all_v, shape));
}

}  // namespace tessera::models::detail
