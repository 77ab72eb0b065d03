// Operators of attention: flash, own and composed.
#include <algorithm>
#include <utility>

#include "tessera/models/trace/operators.h"
#include "tessera/nn/composed_attention.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::models::trace {
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

nn::FlashShape flash_shape(const HeadShape& shape) {
  return {shape.samples,  shape.q_tokens, shape.heads,
          shape.kv_heads, shape.width,    shape.drops};
}

bool is_of_libtorch(const HeadShape& pair) {
  return !pair.drops && pair.window == 0;
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

// Of what a window hides every pair is computed too. The kernel of blocks takes
// no fp64, nor a head of keys that several of queries read.
Traced Operators::masked_attention(const Traced& q, const Traced& k,
                                   const Traced& v,
                                   const HeadShape& shape) const {
  const int64_t places = shape.q_tokens * shape.kv_tokens;
  const Memory mask = bytes(places), bias = elements(places);
  const bool in_blocks = shape.heads == shape.kv_heads && element_ <= 4;
  if (!in_blocks) return score_attention(q, k, v, shape);
  HeadShape all = shape;
  all.window = 0;
  const auto seen = flash(all);
  return tape_.record(
      seen[0], shape.q_numel(), {q, k, v},
      {q.memory, k.memory, v.memory, seen[0], seen[1], bias},
      [this, all](const Memory& gradient) { return flash_backward(all); });
}

// at::_scaled_dot_product_attention_math, in the wide type. Kept are q, k and
// v, these of each head of queries, and softmax's output twice: the second time
// with zeros for rows that see nothing.
Traced Operators::score_attention(const Traced& q, const Traced& k,
                                  const Traced& v,
                                  const HeadShape& shape) const {
  const int64_t queries = shape.q_numel();
  const int64_t scores =
      shape.samples * shape.heads * shape.q_tokens * shape.kv_tokens;
  const int64_t product = 2 * scores * shape.width;
  tape_.forward_flops({.attention = 2 * product});
  const Memory inputs = wides(3 * queries), shares = wides(2 * scores);
  {
    const Memory before = wides(scores), hidden = bytes(scores);
  }
  const Memory out = narrowed(wides(queries), queries);
  return tape_.record(
      out, queries, {q, k, v}, {inputs, shares},
      [=, this,
       kv = shape.kv_numel()](const Memory& gradient) -> std::vector<Memory> {
        tape_.input_flops({.attention = 4 * product});
        const Memory behind = wides(queries), of_scores = wides(2 * scores);
        const Memory sums = wides(3 * queries);  // of each head of queries
        return {elements(queries), elements(kv), elements(kv)};
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
  if (shape.window > 0 && is_composed()) {
    return masked_attention(q, k, v, shape);
  }
  const bool is_own = !is_composed() && (!is_of_libtorch(shape) ||
                                         nn::uses(nn::Kernel::kAttention));
  const auto seen = is_own ? own_flash(shape) : flash(shape);
  return tape_.record(seen[0], shape.q_numel(), {q, k, v},
                      {q.memory, k.memory, v.memory, seen[0], seen[1]},
                      [this, shape, is_own](const Memory& gradient) {
                        return is_own ? own_flash_backward(shape)
                                      : flash_backward(shape);
                      });
}

}  // namespace tessera::models::trace
