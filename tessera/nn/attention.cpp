#include "tessera/nn/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::nn {
namespace {

// Appends k and v (B, T, K, E) to the cache; they become all that it holds.
void append(KvCache& cache, at::Tensor& k, at::Tensor& v) {
  const int64_t tokens = k.size(1);
  TS_CHECK(cache.length + tokens <= cache.capacity,
           "attention: the cache has room for ", cache.capacity,
           " tokens and is asked to hold ", cache.length + tokens, ".");
  if (!cache.keys.defined()) {
    auto shape = k.sizes().vec();
    shape[1] = cache.capacity;
    cache.keys = at::empty(shape, k.options().requires_grad(false));
    cache.values = at::empty_like(cache.keys);
  }
  const at::Tensor keys = cache.keys.narrow(1, cache.length, tokens);
  // Copies would be broadcast.
  TS_CHECK(k.sizes() == keys.sizes() && v.sizes() == keys.sizes(),
           "attention: a cache of ", cache.keys.sizes(), " is not for keys ",
           k.sizes(), " and values ", v.sizes(), ".");
  keys.copy_(k);
  cache.values.narrow(1, cache.length, tokens).copy_(v);
  cache.length += tokens;
  k = cache.keys.narrow(1, 0, cache.length);
  v = cache.values.narrow(1, 0, cache.length);
}

// `is_causal` aligns the first query with the first key; a mask says the rest.
at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, bool is_causal,
                           const std::optional<at::Tensor>& mask = {}) {
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask,
             /*dropout_p=*/0.0, is_causal, /*scale=*/{},
             /*enable_gqa=*/q.size(2) != k.size(2))
      .transpose(1, 2);
}

// Of tokens behind those that `k` and `v` begin with.
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, int64_t window) {
  const int64_t tokens = k.size(1);
  if (q.size(1) == tokens) {
    return window == 0 ? plain_attention(q, k, v, /*is_causal=*/true)
                       : causal_attention(q, k, v, {.window = window});
  }
  // A single query after a past sees every key, or the window's.
  TS_CHECK(q.size(1) == 1,
           "attention: a cache that is not empty takes one token at a time, "
           "not ",
           q.size(1), ".");
  const int64_t seen = window == 0 ? tokens : std::min(window, tokens);
  const auto last = [&](const at::Tensor& x) {
    return x.narrow(1, tokens - seen, seen);
  };
  return plain_attention(q, last(k), last(v), /*is_causal=*/false);
}

// By pieces, of which there is one.
at::Tensor attention_of_all(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Sight& sight) {
  const Pieces whole = {0};
  return piece_attention(q, whole, k, v, whole, sight);
}

// Said once: what has one shape has it at every step.
void say_who_attends(const at::Tensor& q) {
  static const bool said = [&] {
    log::debug("attention of ", q.scalar_type(), " ", q.sizes(), ", strides ",
               q.strides(), ", on ", q.device(), " is LibTorch's.");
    return true;
  }();
  static_cast<void>(said);
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Sight& sight) {
  if (!sight.document_starts.defined()) {
    const bool wants_own =
        uses(Kernel::kAttention) || sight.dropout || sight.window > 0;
    if (wants_own && takes_flash(q, k, v)) {
      return flash_attention(q, k, v, sight.dropout, sight.window);
    }
    TS_CHECK(!sight.dropout || !q.is_cpu(),
             "attention with dropout: there are no loops for ", q.scalar_type(),
             " ", q.sizes(), " on ", q.device(), ".");
    if (sight.dropout) return attention_of_all(q, k, v, sight);
    if (wants_own) say_who_attends(q);
    if (sight.window == 0) return plain_attention(q, k, v, /*is_causal=*/true);
    return plain_attention(q, k, v, /*is_causal=*/false,
                           seen_keys(q.size(1), sight.window, q.options()));
  }
  return attention_of_all(q, k, v, sight);
}

void Attention::make_output(const LinearOptions& options) {
  o_ = register_module("o", std::make_shared<Linear>(options));
}

void Attention::set_region(const Region& region) {
  enter_ = region.enter;
  first_head_ = heads_.count / region.ranks * region.rank;
  o_->set_reduction(region.leave);
}

at::Tensor Attention::forward(const at::Tensor& input, const Places& places,
                              KvCache* cache, CoreAgain* again) const {
  TORCH_INTERNAL_ASSERT(!cache || !again,
                        "a cache is for generation, without a backward");
  const at::Tensor x = enter_ ? enter_(input) : input;
  // The flash kernel divides by the length: it must not see an empty batch.
  TS_CHECK(x.size(0) > 0 && x.size(1) > 0, "attention: an empty batch ",
           x.sizes());
  auto [q, k, v] = project(x, places.rotation);
  if (heads_.q_scale != 1) q = q * heads_.q_scale;
  if (again) {
    const auto of = [this, sight = places.sight](const auto&... qkv) {
      return core(qkv..., sight);
    };
    const at::Tensor y = o_->forward(again->forward(of, q, k, v));
    again->let_go();
    return y;
  }
  at::Tensor y;
  if (cache) {
    append(*cache, k, v);
    y = flat(cached_attention(q, k, v, places.sight.window));
  } else {
    y = core(q, k, v, places.sight);
  }
  return o_->forward(y);
}

at::Tensor Attention::core(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const Sight& sight) const {
  if (!sight.dropout) return flat(heads_out(q, k, v, sight));
  Sight here = sight;
  here.dropout.first_head = first_head_;
  return flat(heads_out(q, k, v, here));
}

// (B, T, H, E).
at::Tensor Attention::heads_out(const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const Sight& sight) const {
  return core_ ? core_(q, k, v, sight) : causal_attention(q, k, v, sight);
}

// Of one head that is padded a part would be a view, of memory of another size.
at::Tensor Attention::flat(const at::Tensor& y) const {
  const bool is_padded = y.size(-1) > heads_.value_dim;
  return (is_padded ? y.narrow(-1, 0, heads_.value_dim).contiguous() : y)
      .flatten(2);
}

GroupedQueryAttention::GroupedQueryAttention(const AttentionOptions& options)
    : Attention({options.heads, options.head_dim, options.q_scale}),
      head_dim_(options.head_dim),
      qk_norm_(options.qk_norm) {
  const int64_t q_width = options.heads * options.head_dim;
  const int64_t kv_width = options.kv_heads * options.head_dim;
  const auto projection = [&](int64_t width, int64_t heads) {
    return std::make_shared<Linear>(
        LinearOptions{options.width, width, options.qkv_bias, options.init_std,
                      Role::column(heads)});
  };
  q_ = register_module("q", projection(q_width, options.heads));
  k_ = register_module("k", projection(kv_width, options.kv_heads));
  v_ = register_module("v", projection(kv_width, options.kv_heads));
  make_output({q_width, options.width, options.out_bias, options.out_init_std,
               Role::row()});
  if (qk_norm_ == QkNorm::kNone) return;
  const auto norm = [&](int64_t heads) {
    const bool each = qk_norm_ == QkNorm::kPerHead;
    return std::make_shared<Norm>(
        options.norm, (each ? 1 : heads) * options.head_dim, options.norm_eps,
        each ? Role::per_head() : Role::column(heads));
  };
  q_norm_ = register_module("q_norm", norm(options.heads));
  k_norm_ = register_module("k_norm", norm(options.kv_heads));
}

void GroupedQueryAttention::set_region(const Region& region) {
  Attention::set_region(region);
  if (qk_norm_ != QkNorm::kAllHeads) return;
  q_norm_->set_region(region);
  k_norm_->set_region(region);
}

Attention::Projected GroupedQueryAttention::project(
    const at::Tensor& x, const Rotation& rotation) const {
  const auto heads_of = [&](const at::Tensor& y) {
    return y.view({x.size(0), x.size(1), -1, head_dim_});
  };
  auto all = forward_all(x, {q_.get(), k_.get(), v_.get()});
  at::Tensor q = std::move(all[0]), k = std::move(all[1]);
  at::Tensor v = heads_of(all[2]);
  const auto norm_where = [&](QkNorm kind) {
    if (qk_norm_ != kind) return;
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  };
  norm_where(QkNorm::kAllHeads);
  q = heads_of(q);  // (B, T, H, E)
  k = heads_of(k);  // (B, T, K, E)
  norm_where(QkNorm::kPerHead);
  if (rotation) {
    q = rotate_in_place(q, rotation);
    k = rotate_in_place(k, rotation);
  }
  return {q, k, v};
}

}  // namespace tessera::nn
