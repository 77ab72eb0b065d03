#include "tessera/models/trace/detail/unit_tracer.h"

#include <algorithm>

#include "tessera/nn/loss.h"

namespace tessera::models::trace::detail {

Traced UnitTracer::norm(const Traced& x) const {
  return family_.norm == nn::NormKind::kLayerNorm
             ? ops_.layer_norm(x, config_.hidden)
             : ops_.rms_norm(x, config_.hidden);
}

Traced UnitTracer::linear(const std::string& layer, const Traced& x, int64_t in,
                          int64_t out, bool bias) const {
  const int64_t rows = model_.samples * model_.tokens;
  const Traced y = ops_.linear(x, rows, in, out, bias, model_.products);
  if (!model_.adapted.contains(layer)) return y;
  const int64_t rank = config_.lora.rank;
  ops_.tape().set_frozen(false);
  const Traced low = ops_.linear(x, rows, in, rank, /*bias=*/false);
  const Traced more = ops_.linear(low, rows, rank, out, /*bias=*/false);
  ops_.tape().set_frozen(true);
  return ops_.add_scaled(y, more);
}

std::vector<Traced> UnitTracer::linears(const std::vector<NamedLayer>& layers,
                                        const Traced& x, int64_t in,
                                        bool bias) const {
  const bool are_plain =
      std::ranges::none_of(layers, [this](const NamedLayer& layer) {
        return model_.adapted.contains(layer.name);
      });
  if (are_plain) {
    std::vector<int64_t> outs;
    for (const auto& layer : layers) outs.push_back(layer.out);
    return ops_.linears(x, model_.samples * model_.tokens, in, outs, bias,
                        model_.products);
  }
  std::vector<Traced> outputs;
  for (const auto& [name, out] : layers) {
    outputs.push_back(linear(name, x, in, out, bias));
  }
  return outputs;
}

Traced UnitTracer::rows(const std::string& layer, const Traced& x, int64_t in,
                        int64_t out, bool bias) const {
  if (!model_.region.leave) return linear(layer, x, in, out, bias);
  const Traced y =
      leave(model_.region, linear(layer, x, in, out, /*bias=*/false));
  return bias ? ops_.add_bias(y, out) : y;
}

Traced UnitTracer::mlp(const Traced& input, const std::string& name,
                       int64_t ffn) const {
  const Traced x = enter(model_.region, input);
  const bool bias = family_.mlp_bias;
  const int64_t width = config_.hidden;
  const auto down = [&](const Traced& y) {
    return rows(name + ".down", y, ffn, width, bias);
  };
  if (!nn::has_gate(family_.mlp)) {
    return down(ops_.gelu(linear(name + ".up", x, width, ffn, bias)));
  }
  const auto both =
      linears({{name + ".gate", ffn}, {name + ".up", ffn}}, x, width, bias);
  return down(ops_.glu(both[0], both[1]));
}

Traced UnitTracer::embed() const {
  const int64_t rows = model_.samples * model_.tokens;
  const int64_t table = model_.vocab * config_.hidden;
  Traced x;
  if (!model_.region.leave) {
    x = ops_.embedding(nullptr, rows * config_.hidden, table);
  } else {
    const Memory own = ops_.numbers(rows);
    Memory elsewhere;
    {
      const Memory below = ops_.bytes(rows), above = ops_.bytes(rows);
      elsewhere = ops_.bytes(rows);
    }
    const Traced found =
        ops_.embedding(ops_.numbers(rows), rows * config_.hidden, table);
    x = leave(model_.region, ops_.masked_fill(found, elsewhere));
  }
  if (family_.scales_embedding) x = ops_.scaled(x, /*in_place=*/true);
  if (family_.learned_positions) x = add_places(x);
  if (config_.dropout == 0) return x;
  return add_kept({}, x, /*of_view=*/false);
}

Traced UnitTracer::add_places(const Traced& x) const {
  // One row for each token of a sample, added to all samples; documents differ
  // from sample to sample.
  const int64_t samples = model_.documents ? model_.samples : 1;
  const Memory places = ops_.numbers(samples * model_.tokens);
  const int64_t numel = samples * model_.hidden_tokens() * config_.hidden;
  const Traced position =
      ops_.embedding(ops_.numbers(samples * model_.tokens), numel,
                     config_.max_seq * config_.hidden);
  return ops_.tape().record(
      ops_.elements(x.numel), x.numel, {x, position}, {},
      [this, numel](const Memory& gradient) -> std::vector<Memory> {
        // Over samples, also where there is one.
        const bool is_summed = !model_.documents;
        return {gradient, is_summed ? ops_.elements(numel) : gradient};
      });
}

Traced UnitTracer::add_kept(const Traced& x, const Traced& y,
                            bool of_view) const {
  return ops_.tape().record(
      of_view ? ops_.elements(y.numel) : y.memory, y.numel, {x, y}, {},
      [this, numel = y.numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, ops_.elements(numel)};
      });
}

Traced UnitTracer::block(const Traced& x, int64_t layer) {
  const bool has_experts = config_.has_experts(layer);
  rotation_ = rotation();
  window_ = config_.window_of(layer);
  const auto add = [this](const Traced& past, const Traced& made,
                          bool of_view) {
    if (config_.dropout > 0) return add_kept(past, made, of_view);
    return of_view ? ops_.add(past, made) : ops_.add_to(past, made);
  };
  const auto half = [&](const Traced& in, const auto& part, bool gives_view) {
    const bool is_behind = family_.norms != NormPlaces::kBefore;
    const auto behind = [&](const Traced& made, const Traced& past) {
      return is_behind ? add(past, norm(made), /*of_view=*/false)
                       : add(past, made, gives_view);
    };
    if (family_.norms == NormPlaces::kBehind) return behind(part(in), in);
    const bool is_layer_norm = family_.norm == nn::NormKind::kLayerNorm;
    const auto [past, normed] = is_layer_norm
                                    ? std::pair(in, norm(in))
                                    : ops_.rms_norm_branch(in, config_.hidden);
    return behind(part(normed), past);
  };
  const Traced y = half(
      x, [this](const Traced& in) { return attention(in); },
      /*gives_view=*/false);
  Traced out = half(
      y,
      [this, has_experts](const Traced& in) {
        return has_experts ? moe(in) : mlp(in, "mlp", model_.ffn);
      },
      /*gives_view=*/has_experts && config_.moe.shared_experts == 0);
  rotation_ = nullptr;
  return out;
}

Traced UnitTracer::samples_of(const Traced& x, int64_t numel) const {
  return ops_.tape().record(
      x.memory, numel, {x}, {},
      [this, all = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {ops_.elements(all)};
      });
}

Traced UnitTracer::joined(const Traced& x, const Traced& y) const {
  const int64_t numel = x.numel + y.numel;
  return ops_.tape().record(ops_.elements(numel), numel, {x, y}, {},
                            [](const Memory& gradient) -> std::vector<Memory> {
                              return {gradient, gradient};
                            });
}

// AheadModule::leave.
Traced UnitTracer::put_behind(const Traced& x, const Traced& y) const {
  const int64_t numel = x.numel + y.numel;
  return ops_.tape().record(
      ops_.elements(numel), numel, {x, y}, {},
      [this, before = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {ops_.elements(before), gradient};
      });
}

// Decoder::enter_ahead.
Traced UnitTracer::enter_ahead(const Traced& x, int64_t depth) const {
  const int64_t width = config_.hidden;
  Traced before = samples_of(x, model_.hidden_numel());
  if (depth == 1) before = norm(before);
  const Traced embedded = embed();
  Traced both;
  {
    const Traced of_tokens = norm(embedded);
    both = joined(of_tokens, norm(before));
  }
  return ops_.linear(both, model_.hidden_numel() / width, 2 * width, width,
                     /*bias=*/false);
}

Traced UnitTracer::predict_ahead(const Traced& x, int64_t depth) {
  const Traced y = block(enter_ahead(x, depth), config_.layers + depth - 1);
  return put_behind(x, norm(y));
}

Traced UnitTracer::before_head(const Traced& x) const {
  if (model_.depths == 0) return enter(model_.region, norm(x));
  const int64_t numel = model_.hidden_numel();
  Traced normed;
  {
    const Traced of_model = norm(samples_of(x, numel));
    normed = joined(of_model, samples_of(x, x.numel - numel));
  }
  return enter(model_.region, normed);
}

void UnitTracer::loss() const {
  for (int64_t depth = 0; depth <= model_.depths; ++depth) {
    loss_of_depth(depth);
  }
}

void UnitTracer::loss_of_depth(int64_t depth) const {
  const int64_t rows = model_.samples * model_.tokens;
  const int64_t width = config_.hidden, vocab = model_.vocab;
  Tape& tape = ops_.tape();
  const int64_t step =
      nn::head_rows(rows, model_.most_vocab, tape.device() == at::kCPU);
  const program::Flops product{.matmul = 2 * rows * width * vocab};
  const bool adds = tape.records() && !tape.is_frozen();
  const int64_t together = ops_.batches_together(step, width, vocab);
  // One weight, where the rows of one depth wait for those of the next.
  const bool has_come = depth > 0 && tape.is_first() && together > 1;
  tape.forward_flops(product);
  if (tape.records()) tape.input_flops(product);
  if (adds) tape.weight_flops(product);
  tape.products.push_back({.rows = rows,
                           .in = width,
                           .out = vocab,
                           .weight_gradient = !tape.is_frozen(),
                           .together = together});
  const Memory logits = ops_.elements(step * vocab);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    ops_.multiply(count, width, vocab);
    cross_entropy(count);
    if (adds && !has_come) ops_.add_gradient(count, width, vocab, together);
    if (tape.records()) ops_.multiply(count, vocab, width);
  }
}

void UnitTracer::cross_entropy(int64_t rows) const {
  const int64_t columns = std::max<int64_t>(1, model_.vocab);
  const Memory is_target = ops_.bytes(rows);
  if (!model_.loss) {
    ops_.numbers(rows);  // of each row its loss, in fp64
    return;
  }
  const int64_t chunk = std::min(
      rows, nn::rows_at_once(columns, ops_.tape().device() == at::kCPU));
  const Memory column = ops_.numbers(rows), weight = ops_.wides(rows);
  model_.loss(ops_, {rows, chunk, columns});
}

}  // namespace tessera::models::trace::detail
