#include "tessera/nn/composed_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "tessera/nn/dropout.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// No score: e^(it - lse) is 0.
constexpr double kUnseen = -1e30;

// (B, H, T, E) -> (B, K, H/K T, E): the queries that read one head of keys.
at::Tensor by_kv_head(const at::Tensor& x, int64_t kv_heads) {
  return x.to(wide_type(x)).reshape({x.size(0), kv_heads, -1, x.size(3)});
}

// (T, S), or not defined: every query sees every key.
at::Tensor unseen(const at::Tensor& q, const at::Tensor& k,
                  const FlashRuns& runs) {
  if (!runs.is_causal && runs.window == 0) return {};
  const auto places = q.options().dtype(at::kLong).requires_grad(false);
  const at::Tensor distance =
      each_of({{runs.first_query, q.size(2)}}, places).unsqueeze(1) -
      each_of({{runs.first_key, k.size(2)}}, places);
  at::Tensor mask =
      runs.is_causal ? distance < 0 : at::zeros_like(distance, at::kBool);
  if (runs.window > 0) mask = mask.logical_or(distance >= runs.window);
  return mask;
}

// (B, H, T, S).
at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k,
                     const FlashRuns& runs) {
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  at::Tensor scores =
      at::matmul(by_kv_head(q, k.size(1)), k.to(wide_type(k)).transpose(2, 3))
          .mul_(scale)
          .view({q.size(0), q.size(1), q.size(2), k.size(2)});
  const at::Tensor mask = unseen(q, k, runs);
  return mask.defined() ? scores.masked_fill_(mask, kUnseen) : scores;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> composed_attention(const at::Tensor& q,
                                                      const at::Tensor& k,
                                                      const at::Tensor& v,
                                                      const FlashRuns& runs) {
  const at::NoGradGuard no_grad;
  const at::Tensor scores = scores_of(q, k, runs);
  at::Tensor lse = at::logsumexp(scores, -1);
  const at::Tensor sees = lse > kUnseen / 2;
  lse = at::where(sees, lse, kUnseen);
  const at::Tensor p = (scores - lse.unsqueeze(-1)).exp_() * sees.unsqueeze(-1);
  const at::Tensor out =
      at::matmul(by_kv_head(p, k.size(1)), v.to(wide_type(v)));
  return {out.view(q.sizes()), lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> composed_attention_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs) {
  const at::NoGradGuard no_grad;
  const int64_t heads = k.size(1);
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor scores = scores_of(q, k, runs);
  at::Tensor p = (scores - lse.unsqueeze(-1)).exp_();
  p = by_kv_head(p * (lse > kUnseen / 2).unsqueeze(-1), heads);
  const at::Tensor gradients = by_kv_head(gradient, heads);
  const at::Tensor along = (gradients * by_kv_head(out, heads)).sum(-1, true);
  const at::Tensor dp =
      at::matmul(gradients, v.to(wide_type(v)).transpose(2, 3)).sub_(along);
  const at::Tensor ds = (p * dp).mul_(scale);
  return {at::matmul(ds, k.to(wide_type(k))).view(q.sizes()),
          at::matmul(ds.transpose(2, 3), by_kv_head(q, heads)),
          at::matmul(p.transpose(2, 3), gradients)};
}

}  // namespace tessera::nn
