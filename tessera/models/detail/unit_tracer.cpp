#include "tessera/models/detail/unit_tracer.h"

#include <algorithm>

namespace tessera::models::detail {

Traced UnitTracer::enter(const Traced& x) const {
  if (local_.tp.size == 1) return x;
  return local_.sequence_parallel
             ? ops_.all_gather_with_reduce_scatter(x, local_.tp)
             : ops_.identity_with_all_reduce(x, local_.tp);
}

Traced UnitTracer::leave(const Traced& x) const {
  if (local_.tp.size == 1) return x;
  return local_.sequence_parallel
             ? ops_.reduce_scatter_with_all_gather(x, local_.tp)
             : ops_.all_reduce_with_identity(x, local_.tp);
}

Traced UnitTracer::norm(const Traced& x) const {
  return local_.family->norm == nn::NormKind::kLayerNorm
             ? ops_.layer_norm(x, local_.width)
             : ops_.rms_norm(x, local_.width);
}

Traced UnitTracer::rows(const Traced& x, int64_t in, int64_t out,
                        bool bias) const {
  const int64_t rows = local_.samples * local_.tokens;
  if (local_.tp.size == 1) return ops_.linear(x, rows, in, out, bias);
  const Traced y = leave(ops_.linear(x, rows, in, out, /*bias=*/false));
  return bias ? ops_.add_bias(y, out) : y;
}

Traced UnitTracer::feed_forward(const Traced& x, int64_t ffn, const Layer& in,
                                const Layer& out) const {
  const int64_t width = local_.width;
  const Traced up = in(x, width, ffn);
  if (local_.family->mlp == nn::MlpKind::kGelu) {
    return out(ops_.gelu(up), ffn, width);
  }
  const Traced gate = in(x, width, ffn);
  const Traced inside = [&] { return ops_.multiply(ops_.silu(gate), up); }();
  return out(inside, ffn, width);
}

Traced UnitTracer::mlp(const Traced& input) const {
  const Traced x = enter(input);
  const bool bias = local_.family->mlp_bias;
  return feed_forward(
      x, local_.ffn,
      [&](const Traced& y, int64_t in, int64_t out) {
        return ops_.linear(y, y.numel / in, in, out, bias);
      },
      [&](const Traced& y, int64_t in, int64_t out) {
        return rows(y, in, out, bias);
      });
}

Traced UnitTracer::embed() const {
  const int64_t rows = local_.samples * local_.tokens;
  const int64_t table = local_.vocab * local_.width;
  Traced x;
  if (local_.tp.size == 1) {
    x = ops_.embedding(nullptr, rows * local_.width, table);
  } else {
    const Memory own = numbers(rows);
    Memory elsewhere;
    {
      const Memory below = bytes(rows), above = bytes(rows);
      elsewhere = bytes(rows);
    }
    const Traced found =
        ops_.embedding(numbers(rows), rows * local_.width, table);
    x = leave(ops_.masked_fill(found, elsewhere));
  }
  if (local_.positions == 0) return x;
  // One row for each token of a sample, added to all samples.
  const Memory places = numbers(local_.tokens);
  const int64_t numel = local_.hidden_tokens() * local_.width;
  const Traced position = ops_.embedding(numbers(local_.tokens), numel,
                                         local_.positions * local_.width);
  return ops_.tape().record(
      ops_.elements(x.numel), x.numel, {x, position}, {},
      [this, numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, local_.samples > 1 ? ops_.elements(numel) : gradient};
      });
}

Traced UnitTracer::block(const Traced& x, bool has_experts) {
  rotation_ = rotation();
  const auto half = [this](const Traced& in, const auto& part) {
    return ops_.add(
        in, local_.family->norm_behind ? norm(part(in)) : part(norm(in)));
  };
  const Traced y = half(x, [this](const Traced& in) { return attention(in); });
  Traced out = half(y, [this, has_experts](const Traced& in) {
    return has_experts ? moe(in) : mlp(in);
  });
  rotation_ = nullptr;
  return out;
}

Traced UnitTracer::head(const Traced& x) const {
  const Traced normed = norm(x);
  const Traced hidden = enter(normed);
  return ops_.linear(hidden, hidden.numel / local_.width, local_.width,
                     local_.vocab, /*bias=*/false);
}

void UnitTracer::loss() const {
  const int64_t rows = local_.samples * local_.tokens;
  const int64_t vocab = std::max<int64_t>(1, local_.vocab);
  // As nn/loss.cpp goes over them.
  const int64_t chunk =
      std::min(rows, std::max<int64_t>(1, (int64_t{1} << 18) / vocab));
  const Memory is_target = bytes(rows), column = numbers(rows);
  const Memory weight = ops_.wides(rows);
  if (local_.tp.size == 1) {
    const Memory log_p = ops_.wides(chunk * vocab);
    if (ops_.element() < ops_.wide()) ops_.wides(chunk * vocab);
    const Memory picked = ops_.wides(2 * chunk);
    return;
  }
  const Memory own = numbers(rows), is_own = bytes(rows);
  const Memory max = ops_.wides(rows);
  ops_.tape().collective("all_reduce", local_.tp.axes, rows * ops_.wide());
  const Memory parts = ops_.wides(2 * rows);
  {
    const Memory z = ops_.wides(chunk * vocab);
    const Memory picked = ops_.wides(chunk), exp = ops_.wides(chunk * vocab);
  }
  ops_.tape().collective("all_reduce", local_.tp.axes, 2 * rows * ops_.wide());
}

}  // namespace tessera::models::detail
