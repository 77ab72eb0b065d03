#include "tessera/nn/latent_attention.h"

#include <ATen/ATen.h>

namespace tessera::nn {
namespace {

constexpr double kNormEps = 1e-6;

// Even features, then odd ones: what rotate() takes for pairs.
at::Tensor by_halves(const at::Tensor& x) {
  return x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
}

}  // namespace

LatentAttention::LatentAttention(const LatentAttentionOptions& options)
    : Attention({options.heads, options.value_dim, options.q_scale}),
      options_(options) {
  const auto linear = [&](const char* name, int64_t in, int64_t out,
                          Role role) {
    return register_module(
        name, std::make_shared<Linear>(LinearOptions{in, out, /*bias=*/false,
                                                     options.init_std, role}));
  };
  const auto norm = [&](const char* name, int64_t width) {
    return register_module(
        name, std::make_shared<Norm>(NormKind::kRmsNorm, width, kNormEps,
                                     Role::in_parts()));
  };
  const int64_t heads = options.heads,
                content = options.head_dim - options.rope_dim;
  const int64_t q_width = heads * options.head_dim;
  if (options.q_rank > 0) {
    q_a_ = linear("q_a", options.width, options.q_rank, Role::in_parts());
    q_a_norm_ = norm("q_a_norm", options.q_rank);
    q_b_ = linear("q_b", options.q_rank, q_width, Role::column(heads));
  } else {
    q_ = linear("q", options.width, q_width, Role::column(heads));
  }
  kv_a_ = linear("kv_a", options.width, options.kv_rank + options.rope_dim,
                 Role::in_parts());
  kv_a_norm_ = norm("kv_a_norm", options.kv_rank);
  kv_b_ = linear("kv_b", options.kv_rank, heads * (content + options.value_dim),
                 Role::column(heads));
  make_output({heads * options.value_dim, options.width, /*bias=*/false,
               options.out_init_std, Role::row()});
}

Attention::Projected LatentAttention::project(const at::Tensor& x,
                                              const Rotation& rotation) const {
  const int64_t rope = options_.rope_dim, value = options_.value_dim;
  const int64_t content = options_.head_dim - rope;
  const auto heads_of = [&](const at::Tensor& y, int64_t width) {
    return y.view({x.size(0), x.size(1), -1, width});
  };
  const auto turned = [&](const at::Tensor& part) {
    return rotate(by_halves(part), rotation);
  };
  const auto all = forward_all(x, {q_ ? q_.get() : q_a_.get(), kv_a_.get()});
  at::Tensor q = q_ ? all[0] : q_b_->forward(q_a_norm_->forward(all[0]));
  q = heads_of(q, options_.head_dim);
  q = at::cat({q.narrow(-1, 0, content), turned(q.narrow(-1, content, rope))},
              -1);
  const at::Tensor latent = all[1].narrow(-1, 0, options_.kv_rank);
  const at::Tensor kv =
      heads_of(kv_b_->forward(kv_a_norm_->forward(latent.contiguous())),
               content + value);
  const at::Tensor k_rope =
      turned(heads_of(all[1].narrow(-1, options_.kv_rank, rope), rope));
  const int64_t heads = kv.size(2);
  const at::Tensor k = at::cat(
      {kv.narrow(-1, 0, content), k_rope.expand({-1, -1, heads, -1})}, -1);
  const at::Tensor v = at::constant_pad_nd(kv.narrow(-1, content, value),
                                           {0, options_.head_dim - value});
  return {q, k, v};
}

}  // namespace tessera::nn
