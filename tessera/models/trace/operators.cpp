#include "tessera/models/trace/operators.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/nn/composed_attention.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/waiting_rows.h"

namespace tessera::models::trace {
namespace {

constexpr int64_t kRowsPerPart = 64;  // of nn's norm, whose parts are summed

Traced made_again(Traced output, int64_t beside) {
  output.again_beside = beside;
  return output;
}

}  // namespace

Ranks along(const mesh::DeviceMesh& mesh, const std::vector<mesh::Axis>& axes) {
  Ranks ranks;
  for (mesh::Axis axis : axes) {
    if (mesh.degree(axis) == 1) continue;
    ranks.axes.push_back(axis);
    ranks.size *= mesh.degree(axis);
  }
  return ranks;
}

// Of one type a gradient is added where it lies, and so where it is widened; in
// one pass behind the product of low precision.
void Operators::multiply(int64_t rows, int64_t in, int64_t out,
                         bool adds_gradient) const {
  const bool mixes = adds_gradient && tape_.mixes_types();
  const bool into_wide = mixes && tape_.gradient() == at::kFloat;
  const int64_t widened =
      nn::widened_numbers(tape_.compute(), rows, in, out, into_wide, threads_);
  // cuBLAS sums in fp32 where the gradient lies.
  const bool sums_there = into_wide && tape_.device() == at::kCUDA;
  if (!mixes || sums_there || (widened > 0 && into_wide)) {
    wides(widened);
    return;
  }
  const Memory product = elements(rows * out);
  wides(widened);
  if (!into_wide) wides(rows * out);
}

int64_t Operators::batches_together(int64_t rows, int64_t in,
                                    int64_t out) const {
  const bool may_wait = !tape_.is_frozen() && tape_.device() == at::kCPU &&
                        uses(nn::Kernel::kGradientInPlace);
  return may_wait ? nn::batches_together(rows, in, out, tape_.batches(),
                                         tape_.compute())
                  : 1;
}

void Operators::add_gradient(int64_t rows, int64_t in, int64_t out,
                             int64_t together) const {
  if (together > 1 && tape_.is_first()) {
    tape_.keep(elements(together * rows * (in + out)));
  } else {
    multiply(out, together * rows, in, /*adds_gradient=*/true);
  }
}

std::vector<Traced> Operators::linears(const Traced& x, int64_t rows,
                                       int64_t in,
                                       const std::vector<int64_t>& outs,
                                       bool bias, nn::ProductType type) const {
  const bool has_input_gradient = x.node != nullptr;
  // What is kept of the input is for the weights' gradients alone.
  const bool is_frozen = tape_.is_frozen();
  const bool is_remade = x.node != nullptr && x.again_beside >= 0 &&
                         nn::makes_inputs_again(tape_.device());
  const size_t count = outs.size();
  const auto is_fp8 = [in, type](int64_t out) {
    return type == nn::ProductType::kFp8 && nn::takes_fp8(out, in);
  };
  Memory rounded;
  std::vector<Traced> inputs = {x};
  std::vector<Output> outputs;
  std::vector<int64_t> together;
  for (const int64_t out : outs) {
    together.push_back(batches_together(rows, in, out));
    tape_.forward_flops({.matmul = 2 * rows * in * out});
    tape_.products.push_back(
        {rows, in, out, has_input_gradient, !is_frozen, together.back()});
    inputs.push_back(tape_.parameter(in * out));
    outputs.push_back({elements(rows * out), rows * out});
    if (is_fp8(out)) {
      if (!rounded) rounded = fp8_rows(rows, in);
      multiply_fp8(rows, in, out);
    } else {
      multiply(rows, in, out);
    }
  }
  rounded = nullptr;
  for (const int64_t out : outs) {
    if (bias) inputs.push_back(tape_.parameter(out));
  }
  return tape_.record_all(
      outputs, inputs,
      is_frozen || is_remade ? std::vector<Memory>{} : std::vector{x.memory},
      [=, this, beside = x.again_beside,
       kept = std::weak_ptr(x.memory)](const std::vector<Memory>& arrived) {
        std::vector<Memory> gradients(1 + (bias ? 2 : 1) * count);
        Memory again;
        for (size_t i = 0; i < count; ++i) {
          const program::Flops product{.matmul = 2 * rows * in * outs[i]};
          if (has_input_gradient) {
            tape_.input_flops(product);
            if (i == 0) gradients[0] = elements(rows * in);
            if (is_fp8(outs[i])) {
              const Memory part = i == 0 ? nullptr : elements(rows * in);
              const Memory dy = fp8_rows(rows, outs[i]);
              multiply_fp8(rows, outs[i], in);
            } else {
              multiply(rows, outs[i], in);
            }
          }
          if (is_frozen) continue;
          if (is_remade && !again) {
            again = elements(rows * in);
            bytes(beside);
          }
          tape_.weight_flops(product);
          const auto add = [=, this] {
            add_gradient(rows, in, outs[i], together[i]);
          };
          if (tape_.puts_off()) {
            tape_.put_off({arrived[i], is_remade ? again : kept.lock()}, add);
          } else {
            add();
          }
          if (bias) gradients[1 + count + i] = elements(outs[i]);
        }
        return gradients;
      });
}

// Where loops of a GPU do not write them at once, they are fp32 before.
Memory Operators::fp8_rows(int64_t rows, int64_t width) const {
  const Memory wide =
      tape_.device() == at::kCUDA ? nullptr : wides(rows * width);
  return bytes(rows * width + rows * wide_);
}

// Emulated: both operands and the product in fp32.
void Operators::multiply_fp8(int64_t rows, int64_t in, int64_t out) const {
  const Memory weight = fp8_rows(out, in);
  if (tape_.device() == at::kCUDA) return;
  const Memory wide = wides(rows * in), wide_weight = wides(out * in);
  wides(rows * out);
}

Traced Operators::grouped_linear(const Traced& x, int64_t rows, int64_t in,
                                 int64_t out, int64_t experts) const {
  const program::Flops product{.matmul = 2 * rows * in * out};
  tape_.forward_flops(product);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t own = (rows + e) / experts;  // which sum up to `rows`
    tape_.products.push_back({.rows = own, .in = in, .out = out});
  }
  const int64_t weights = experts * in * out;
  const int64_t own = (rows + experts - 1) / experts;
  const Memory y = elements(rows * out);
  multiply(own, in, out);
  return tape_.record(y, rows * out, {x, tape_.parameter(weights)}, {x.memory},
                      [=, this, kept = std::weak_ptr(x.memory)](
                          const Memory& gradient) -> std::vector<Memory> {
                        tape_.input_flops(product);
                        Memory dx = elements(rows * in);
                        multiply(own, out, in);
                        if (tape_.is_frozen()) return {std::move(dx), nullptr};
                        tape_.weight_flops(product);
                        const bool at_once = tape_.device() == at::kCUDA &&
                                             tape_.compute() == at::kBFloat16;
                        const auto add = [=, this] {
                          if (at_once) {
                            elements(weights);
                          } else {
                            multiply(out, own, in, /*adds_gradient=*/true);
                          }
                        };
                        if (tape_.puts_off()) {
                          tape_.put_off({gradient, kept.lock()}, add);
                        } else {
                          add();
                        }
                        return {std::move(dx), nullptr};
                      });
}

Traced Operators::add_bias(const Traced& x, int64_t width) const {
  return tape_.record(
      elements(x.numel), x.numel, {x, tape_.parameter(width)}, {},
      [this, width](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, elements(width)};
      });
}

Traced Operators::add_scaled(const Traced& x, const Traced& y) const {
  return tape_.record(
      elements(x.numel), x.numel, {x, y}, {},
      [this, numel = y.numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, elements(numel)};
      });
}

Traced Operators::add(const Traced& x, const Traced& y) const {
  return tape_.record(elements(x.numel), x.numel, {x, y}, {},
                      [](const Memory& gradient) -> std::vector<Memory> {
                        return {gradient, gradient};
                      });
}

Traced Operators::add_to(const Traced& x, const Traced& y) const {
  return tape_.record(y.memory, x.numel, {x, y}, {},
                      [](const Memory& gradient) -> std::vector<Memory> {
                        return {gradient, gradient};
                      });
}

Traced Operators::scaled(const Traced& x, bool in_place) const {
  return tape_.record(
      in_place ? x.memory : elements(x.numel), x.numel, {x}, {},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
}

Traced Operators::rms_norm(const Traced& x, int64_t width) const {
  return rms_norm_branch(x, width).second;
}

std::vector<Memory> Operators::norm_gradients(int64_t rows,
                                              int64_t width) const {
  Memory dx = elements(rows * width);
  const int64_t parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  const Memory partial = wides(parts * width);
  const Memory sum = wides(width);
  return {std::move(dx), elements(width)};
}

std::pair<Traced, Traced> Operators::rms_norm_branch(const Traced& x,
                                                     int64_t width) const {
  const int64_t rows = x.numel / width;
  const Memory y = elements(x.numel), inverse_rms = wides(rows);
  const auto both = tape_.record_all(
      {{x.memory, x.numel}, {y, x.numel}}, {x, tape_.parameter(width)},
      {x.memory, inverse_rms}, [this, rows, width](const std::vector<Memory>&) {
        return norm_gradients(rows, width);
      });
  return {both[0], made_again(both[1], inverse_rms->bytes())};
}

Traced Operators::layer_norm(const Traced& x, int64_t width) const {
  const int64_t rows = x.numel / width;
  const Memory y = elements(x.numel), mean = wides(rows), rstd = wides(rows);
  const Traced weight = tape_.parameter(width), bias = tape_.parameter(width);
  const Traced normed = tape_.record(
      y, x.numel, {x, weight, bias}, {x.memory, mean, rstd},
      [this, numel = x.numel,
       width](const Memory& gradient) -> std::vector<Memory> {
        Memory dx = elements(numel), dweight = elements(width);
        Memory dbias = elements(width);
        const Memory partial = wides(2 * threads_ * width);
        return {std::move(dx), std::move(dweight), std::move(dbias)};
      });
  return made_again(normed, mean->bytes() + rstd->bytes());
}

Traced Operators::gelu(const Traced& x) const {
  const Traced y = tape_.record(
      elements(x.numel), x.numel, {x}, {x.memory},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
  return made_again(y, 0);
}

Traced Operators::glu(const Traced& gate, const Traced& up) const {
  const Traced y = tape_.record(
      elements(up.numel), up.numel, {gate, up}, {gate.memory, up.memory},
      [this, numel = up.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel), elements(numel)};
      });
  return made_again(y, 0);
}

Traced Operators::rotate(const Traced& x, const Memory& kept,
                         bool in_place) const {
  return tape_.record(
      in_place ? x.memory : elements(x.numel), x.numel, {x}, {kept},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient.use_count() == 1 ? gradient : elements(numel)};
      });
}

Traced Operators::reorder(const Traced& x, bool copied_back) const {
  return tape_.record(elements(x.numel), x.numel, {x}, {},
                      [this, copied_back, numel = x.numel](
                          const Memory& gradient) -> std::vector<Memory> {
                        return {copied_back ? elements(numel) : gradient};
                      });
}

Traced Operators::index_select(const Traced& x, int64_t numel,
                               const Memory& index) const {
  return tape_.record(
      elements(numel), numel, {x}, {index},
      [this, from = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(from)};
      });
}

Traced Operators::embedding(const Memory& index, int64_t numel,
                            int64_t table_numel) const {
  return tape_.record(elements(numel), numel, {tape_.parameter(table_numel)},
                      {index},
                      [=, this](const Memory& gradient) -> std::vector<Memory> {
                        // A device has it by itself before it is added.
                        if (tape_.device() != at::kCPU) {
                          elements(table_numel);
                        } else if (tape_.puts_off()) {
                          tape_.put_off({gradient}, [] {});
                        }
                        return {nullptr};
                      });
}

Traced Operators::masked_fill(const Traced& x, const Memory& mask) const {
  return tape_.record(
      elements(x.numel), x.numel, {x}, {mask},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
}

Memory Operators::all_reduced(int64_t numel, const Ranks& ranks) const {
  Memory sum = elements(numel);
  tape_.collective("all_reduce", ranks.axes, numel * element_);
  return sum;
}

// Of pieces of so many elements, along a dim that is not the first.
Memory Operators::gathered(int64_t numel, const Ranks& ranks) const {
  const Memory pieces = elements(numel * ranks.size);
  tape_.collective("all_gather", ranks.axes, numel * ranks.size * element_);
  return elements(numel * ranks.size);
}

Memory Operators::scattered(int64_t numel, const Ranks& ranks) const {
  const Memory pieces = elements(numel);
  Memory piece = elements(numel / ranks.size);
  tape_.collective("reduce_scatter", ranks.axes, numel * element_);
  return piece;
}

Traced Operators::identity_with_all_reduce(const Traced& x,
                                           const Ranks& ranks) const {
  return tape_.record(x.memory, x.numel, {x}, {},
                      [this, ranks, numel = x.numel](
                          const Memory& gradient) -> std::vector<Memory> {
                        return {all_reduced(numel, ranks)};
                      });
}

Traced Operators::all_reduce_with_identity(const Traced& x,
                                           const Ranks& ranks) const {
  return tape_.record(
      all_reduced(x.numel, ranks), x.numel, {x}, {},
      [](const Memory& gradient) -> std::vector<Memory> { return {gradient}; });
}

Traced Operators::all_gather_with_reduce_scatter(const Traced& x,
                                                 const Ranks& ranks) const {
  const int64_t whole = x.numel * ranks.size;
  return tape_.record(
      gathered(x.numel, ranks), whole, {x}, {},
      [this, ranks, whole](const Memory& gradient) -> std::vector<Memory> {
        return {scattered(whole, ranks)};
      });
}

Traced Operators::reduce_scatter_with_all_gather(const Traced& x,
                                                 const Ranks& ranks) const {
  const int64_t piece = x.numel / ranks.size;
  return tape_.record(
      scattered(x.numel, ranks), piece, {x}, {},
      [this, ranks, piece](const Memory& gradient) -> std::vector<Memory> {
        return {gathered(piece, ranks)};
      });
}

// Of one sample it lies in one: nothing is copied.
Memory Operators::split(const Memory& whole, const TokenPiece& piece) const {
  if (piece.samples == 1) return whole;
  return elements(piece.samples * piece.here * piece.width);
}

Memory Operators::joined(const TokenPiece& piece, const Ranks& ranks) const {
  const int64_t most = piece.samples * piece.most * piece.width;
  const Memory padded = piece.here < piece.most ? elements(most) : nullptr;
  return gathered(most, ranks);
}

Traced Operators::split_with_all_gather(const Traced& x,
                                        const TokenPiece& piece,
                                        const Ranks& ranks) const {
  return tape_.record(
      split(x.memory, piece), piece.samples * piece.here * piece.width, {x}, {},
      [this, piece, ranks](const Memory& gradient) -> std::vector<Memory> {
        return {joined(piece, ranks)};
      });
}

Traced Operators::all_gather_with_split(const Traced& x,
                                        const TokenPiece& piece,
                                        const Ranks& ranks) const {
  return tape_.record(
      joined(piece, ranks), piece.samples * piece.whole * piece.width, {x}, {},
      [this, piece](const Memory& gradient) -> std::vector<Memory> {
        return {split(gradient, piece)};
      });
}

Traced Operators::all_to_all(const Traced& x, int64_t numel, const Ranks& ranks,
                             bool copied_back) const {
  const int64_t bytes = std::max(numel, x.numel) * element_;
  Memory output = elements(numel);
  tape_.collective("all_to_all", ranks.axes, bytes);
  return tape_.record(
      std::move(output), numel, {x}, {},
      [=, this, from = x.numel](const Memory& gradient) -> std::vector<Memory> {
        Memory home = elements(from);
        const Memory sent = copied_back ? elements(numel) : gradient;
        tape_.collective("all_to_all", ranks.axes, bytes);
        return {std::move(home)};
      });
}

Operators::Travelling Operators::start_all_to_all(const Traced& x,
                                                  int64_t numel,
                                                  const Ranks& ranks) const {
  Memory output = elements(numel);
  tape_.collective("all_to_all", ranks.axes,
                   std::max(numel, x.numel) * element_);
  const auto came_back = std::make_shared<Memory>();
  return {tape_.record(std::move(output), numel, {x}, {},
                       [came_back](const Memory&) -> std::vector<Memory> {
                         return {std::exchange(*came_back, nullptr)};
                       }),
          x.memory, came_back, x.numel};
}

Traced Operators::finish_all_to_all(const Travelling& travelling,
                                    const Ranks& ranks) const {
  const Traced& rows = travelling.rows;
  return tape_.record(
      rows.memory, rows.numel, {rows}, {},
      [=, this, came_back = travelling.came_back, from = travelling.from,
       numel = rows.numel](const Memory& gradient) -> std::vector<Memory> {
        *came_back = elements(from);
        tape_.collective("all_to_all", ranks.axes,
                         std::max(numel, from) * element_);
        return {gradient};
      });
}

std::vector<Traced> Operators::parted(
    const Traced& x, const std::vector<int64_t>& numels) const {
  std::vector<Output> outputs;
  for (const int64_t numel : numels)
    outputs.push_back({elements(numel), numel});
  return tape_.record_all(
      outputs, {x}, {},
      [this, from = x.numel](const std::vector<Memory>&)
          -> std::vector<Memory> { return {elements(from)}; });
}

Traced Operators::put_together(const std::vector<Traced>& parts) const {
  std::vector<int64_t> numels;
  for (const Traced& part : parts) numels.push_back(part.numel);
  const int64_t all = std::reduce(numels.begin(), numels.end());
  return tape_.record(elements(all), all, parts, {},
                      [this, numels](const Memory&) -> std::vector<Memory> {
                        std::vector<Memory> gradients;
                        for (const int64_t numel : numels) {
                          gradients.push_back(elements(numel));
                        }
                        return gradients;
                      });
}

namespace {

// The kernel goes over blocks of queries and of keys.
struct Blocks {
  int64_t queries, keys;
};

Blocks blocks_of(const HeadShape& shape) {
  constexpr int64_t kKeys = 512;
  const int64_t t = shape.q_tokens;
  const int64_t queries = t >= 768 ? 256 : t >= 192 ? 64 : 32;
  return {std::min(queries, t), std::min(kKeys, shape.kv_tokens)};
}

// Keys that are counted for a query: those of its window, if there is one. Of
// the same tokens as many for each, as if some came before the first.
int64_t keys_of(const HeadShape& shape, int64_t query) {
  if (shape.window == 0) return shape.kv_tokens;
  if (shape.behind == 0) return std::min(shape.window, shape.kv_tokens);
  const int64_t first = shape.behind + query - shape.window + 1;
  return std::clamp<int64_t>(shape.kv_tokens - first, 0, shape.kv_tokens);
}

int64_t pairs_of(const HeadShape& shape) {
  int64_t pairs = 0;
  for (int64_t q = 0; q < shape.q_tokens; ++q) pairs += keys_of(shape, q);
  return shape.samples * shape.heads * pairs;
}

}  // namespace

std::vector<Memory> Operators::flash(const HeadShape& shape) const {
  tape_.forward_flops({.attention = 4 * pairs_of(shape) * shape.width});
  const auto [queries, keys] = blocks_of(shape);
  Memory out = elements(shape.q_numel()), lse = wides(shape.lse_numel());
  const Memory scores = wides(threads_ * queries * (keys + 2 + shape.width));
  const Memory narrow =
      element_ < wide_ ? elements(threads_ * queries * keys) : nullptr;
  return {std::move(out), std::move(lse)};
}

std::vector<Memory> Operators::flash_backward(const HeadShape& shape) const {
  tape_.input_flops({.attention = 10 * pairs_of(shape) * shape.width});
  const auto [queries, keys] = blocks_of(shape);
  Memory dq = elements(shape.q_numel()), dk = elements(shape.kv_numel());
  Memory dv = elements(shape.kv_numel());
  const Memory scores = wides(threads_ * queries * (2 * keys + 1));
  const Memory narrow =
      element_ < wide_ ? elements(threads_ * queries * 2 * keys) : nullptr;
  return {std::move(dq), std::move(dk), std::move(dv)};
}

namespace {

nn::FlashShape flash_shape(const HeadShape& shape) {
  return {shape.samples,  shape.q_tokens, shape.heads,
          shape.kv_heads, shape.width,    shape.drops};
}

}  // namespace

std::vector<Memory> Operators::own_flash(const HeadShape& shape) const {
  tape_.forward_flops({.attention = 4 * pairs_of(shape) * shape.width});
  Memory out = elements(shape.q_numel()), lse = wides(shape.lse_numel());
  const Memory scratch = wides(nn::flash_scratch(flash_shape(shape), threads_));
  return {std::move(out), std::move(lse)};
}

std::vector<Memory> Operators::own_flash_backward(
    const HeadShape& shape) const {
  tape_.input_flops({.attention = 10 * pairs_of(shape) * shape.width});
  Memory dq = elements(shape.q_numel()), dk = elements(shape.kv_numel());
  Memory dv = elements(shape.kv_numel());
  const Memory scratch =
      wides(nn::flash_backward_scratch(flash_shape(shape), threads_));
  return {std::move(dq), std::move(dk), std::move(dv)};
}

Memory Operators::narrowed(const Memory& sum, int64_t numel) const {
  return element_ == wide_ ? sum : elements(numel);
}

namespace {

bool is_of_libtorch(const HeadShape& pair) {
  return !pair.drops && pair.window == 0;
}

}  // namespace

// Beside the scores lie as many numbers: what of them logsumexp sums, or in the
// backward the gradients of weights.
std::vector<Memory> Operators::composed(const HeadShape& shape) const {
  tape_.forward_flops({.attention = 4 * pairs_of(shape) * shape.width});
  const int64_t scores = shape.heads * shape.q_tokens * shape.kv_tokens;
  const int64_t most = nn::samples_at_once(shape.samples, scores);
  const int64_t parts = most < shape.samples ? 2 : 1;  // and put together
  Memory out = wides(parts * shape.q_numel());
  Memory lse = wides(parts * shape.lse_numel());
  const Memory all = wides(2 * most * scores);
  return {std::move(out), std::move(lse)};
}

std::vector<Memory> Operators::composed_backward(const HeadShape& shape) const {
  tape_.input_flops({.attention = 10 * pairs_of(shape) * shape.width});
  const int64_t scores = shape.heads * shape.q_tokens * shape.kv_tokens;
  const int64_t most = nn::samples_at_once(shape.samples, scores);
  const int64_t parts = most < shape.samples ? 2 : 1;
  Memory dq = wides(parts * shape.q_numel());
  Memory dk = wides(parts * shape.kv_numel());
  Memory dv = wides(parts * shape.kv_numel());
  const Memory all = wides(2 * most * scores);
  // The gradient and a factor, in the wide type and in order.
  const Memory copies = wides(2 * most * (shape.q_numel() / shape.samples));
  return {std::move(dq), std::move(dk), std::move(dv)};
}

void Operators::attend(const HeadShape& pair, bool merges) const {
  const auto seen = is_composed()          ? composed(pair)
                    : is_of_libtorch(pair) ? flash(pair)
                                           : own_flash(pair);
  if (!merges) return;
  const Memory merged = wides(pair.lse_numel());
  const Memory scale = wides(pair.lse_numel());
  const Memory product = wides(pair.q_numel());
}

void Operators::attend_backward(const HeadShape& pair) const {
  if (is_composed()) {
    composed_backward(pair);
    return;
  }
  is_of_libtorch(pair) ? flash_backward(pair) : own_flash_backward(pair);
}

Traced Operators::piece_attention(const Traced& q, const Traced& k,
                                  const Traced& v,
                                  const std::vector<HeadShape>& pairs) const {
  const int64_t width = pairs.front().width;
  const Memory sum = wides(q.numel), lse = wides(q.numel / width);
  for (const HeadShape& pair : pairs) {
    attend(pair, /*merges=*/k.numel > pair.kv_numel());
  }
  const Memory out = narrowed(sum, q.numel);
  return tape_.record(
      out, q.numel, {q, k, v}, {q.memory, k.memory, v.memory, out, lse},
      [=, this, kv = k.numel,
       queries = q.numel](const Memory& gradient) -> std::vector<Memory> {
        const Memory dq = wides(queries), dk = wides(kv), dv = wides(kv);
        for (const HeadShape& pair : pairs) attend_backward(pair);
        return {narrowed(dq, queries), narrowed(dk, kv), narrowed(dv, kv)};
      });
}

Traced Operators::attention(const Traced& q, const Traced& k, const Traced& v,
                            const HeadShape& shape, bool documents) const {
  if (documents) {
    HeadShape sample = shape;
    sample.samples = 1;
    if (shape.window >= shape.q_tokens) sample.window = 0;
    return piece_attention(q, k, v, std::vector(shape.samples, sample));
  }
  if (shape.drops && is_composed()) return piece_attention(q, k, v, {shape});
  const bool is_own =
      !is_of_libtorch(shape) || nn::uses(nn::Kernel::kAttention);
  const auto seen = is_own ? own_flash(shape) : flash(shape);
  return tape_.record(seen[0], shape.q_numel(), {q, k, v},
                      {q.memory, k.memory, v.memory, seen[0], seen[1]},
                      [this, shape, is_own](const Memory& gradient) {
                        return is_own ? own_flash_backward(shape)
                                      : flash_backward(shape);
                      });
}

}  // namespace tessera::models::trace
