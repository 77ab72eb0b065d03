#include <utility>

#include "tessera/models/trace/detail/unit_tracer.h"

namespace tessera::models::trace::detail {

// The angles of a rank whose tokens are not one run; else they are a part of
// what all share.
Memory UnitTracer::rotation() const {
  if (family_.learned_positions || model_.pieces.size() == 1) return nullptr;
  return ops_.wides(model_.tokens * config_.rotary_dim());
}

HeadShape UnitTracer::heads_here() const {
  return {.samples = model_.samples,
          .q_tokens = model_.tokens,
          .kv_tokens = model_.tokens,
          .heads = model_.heads,
          .kv_heads = model_.kv_heads,
          .width = config_.head_dim,
          .drops = config_.dropout > 0,
          .window = window_};
}

Traced UnitTracer::attention(const Traced& input) const {
  const Traced x = enter(model_.region, input);
  auto [q, k, v] =
      family_.latent_attention ? latent_heads(x) : grouped_heads(x);
  if (config_.query_scale() != 1) q = ops_.scaled(q, /*in_place=*/false);
  const Traced y = core(q, k, v);
  const int64_t width = model_.heads * config_.value_dim();
  const Traced out =
      rows("attention.o", y, width, config_.hidden, family_.out_bias);
  if (again_ != nullptr) y.memory->let_go();
  return out;
}

UnitTracer::Heads UnitTracer::grouped_heads(const Traced& x) const {
  const int64_t width = config_.hidden;
  const int64_t q_width = model_.heads * config_.head_dim;
  const int64_t kv_width = model_.kv_heads * config_.head_dim;
  auto all = linears({{"attention.q", q_width},
                      {"attention.k", kv_width},
                      {"attention.v", kv_width}},
                     x, width, family_.qkv_bias);
  Traced q = std::move(all[0]), k = std::move(all[1]);
  if (family_.qk_norm == nn::QkNorm::kAllHeads) {
    q = norm_of_heads(q, q_width);
    k = norm_of_heads(k, kv_width);
  }
  if (family_.qk_norm == nn::QkNorm::kPerHead) {
    q = ops_.rms_norm(q, config_.head_dim);
    k = ops_.rms_norm(k, config_.head_dim);
  }
  if (!family_.learned_positions) {
    q = ops_.rotate(q, rotation_, /*in_place=*/true);
    k = ops_.rotate(k, rotation_, /*in_place=*/true);
  }
  return {q, k, std::move(all[2])};
}

// What takes a part of x, or puts parts together: `numel` elements, and of the
// gradient as many as x has.
Traced UnitTracer::part_of(const Traced& x, int64_t numel) const {
  return ops_.tape().record(
      ops_.elements(numel), numel, {x}, {},
      [this, all = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {ops_.elements(all)};
      });
}

// nn/latent_attention.cpp.
UnitTracer::Heads UnitTracer::latent_heads(const Traced& x) const {
  const LatentConfig& latent = config_.latent;
  const int64_t tokens = model_.samples * model_.tokens;
  const int64_t heads = model_.heads, width = config_.head_dim;
  const int64_t rope = latent.rope_dim, content = width - rope;
  const auto joined = [&](const Traced& a, const Traced& b, int64_t numel) {
    return ops_.tape().record(
        ops_.elements(numel), numel, {a, b}, {},
        [this, a = a.numel,
         b = b.numel](const Memory& gradient) -> std::vector<Memory> {
          return {ops_.elements(a), ops_.elements(b)};
        });
  };
  const auto turned = [&](const Traced& part) {
    return ops_.rotate(part, rotation_, /*in_place=*/false);
  };
  const bool direct = latent.q_rank == 0;
  auto all = linears({{direct ? "attention.q" : "attention.q_a",
                       direct ? heads * width : latent.q_rank},
                      {"attention.kv_a", latent.kv_rank + rope}},
                     x, config_.hidden, /*bias=*/false);
  Traced q = std::move(all[0]);
  if (!direct) {
    q = linear("attention.q_b", ops_.rms_norm(q, latent.q_rank), latent.q_rank,
               heads * width, /*bias=*/false);
  }
  const int64_t q_numel = tokens * heads * width;
  q = joined(q, turned(part_of(q, tokens * heads * rope)), q_numel);
  const Traced kv = linear(
      "attention.kv_b",
      ops_.rms_norm(part_of(all[1], tokens * latent.kv_rank), latent.kv_rank),
      latent.kv_rank, heads * (content + latent.value_dim), /*bias=*/false);
  const Traced k_rope = turned(part_of(all[1], tokens * rope));
  return {q, joined(kv, k_rope, q_numel), part_of(kv, q_numel)};
}

// nn's SharedRmsNorm.
Traced UnitTracer::norm_of_heads(const Traced& x, int64_t width) const {
  if (!model_.region.leave) return ops_.rms_norm(x, width);
  const int64_t numel = x.numel, rows = numel / width;
  const bool narrow = ops_.element() < ops_.wide();
  const auto widened = [=, this](const Memory& of) {
    return narrow ? ops_.wides(numel) : of;
  };
  const auto mean_of_product = [=, this] {
    const Memory product = ops_.wides(numel), means = ops_.wides(rows);
    return mean_over_ranks(rows);
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

Memory UnitTracer::mean_over_ranks(int64_t rows) const {
  const Operators wide = ops_.widened();
  const Traced part{wide.elements(rows), rows, nullptr};
  return model_.region.enter(wide, model_.region.leave(wide, part)).memory;
}

Traced UnitTracer::core(const Traced& q, const Traced& k,
                        const Traced& v) const {
  Tape& tape = ops_.tape();
  if (!model_.attention_again || !tape.records()) return kept_core(q, k, v);
  tape.set_records(false);
  const Traced y = kept_core(q, k, v);
  tape.set_records(true);
  again_ = std::make_shared<CoreAgain>(CoreAgain{tape.leaf(q.numel, q.memory),
                                                 tape.leaf(k.numel, k.memory),
                                                 tape.leaf(v.numel, v.memory),
                                                 {}});
  return tape.record(y.memory, y.numel, {q, k, v}, {},
                     [&tape, of = again_](const Memory& gradient) {
                       tape.backward({of->y}, {gradient});
                       return std::vector{tape.take_gradient(of->q),
                                          tape.take_gradient(of->k),
                                          tape.take_gradient(of->v)};
                     });
}

void UnitTracer::compute_core_again() const {
  if (again_ == nullptr) return;
  const auto of = std::exchange(again_, nullptr);
  of->y = kept_core(of->q, of->k, of->v);
}

Traced UnitTracer::kept_core(const Traced& q, const Traced& k,
                             const Traced& v) const {
  const Traced y =
      model_.attention
          ? model_.attention(ops_, q, k, v, heads_here())
          : ops_.attention(q, k, v, heads_here(), model_.documents);
  const int64_t values = config_.value_dim();
  if (values == config_.head_dim) return y;
  return part_of(y, model_.samples * model_.tokens * model_.heads * values);
}

}  // namespace tessera::models::trace::detail
