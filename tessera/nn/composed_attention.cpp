#include "tessera/nn/composed_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "tessera/nn/detail/drop.h"
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

// In place, of (B, H, T, S).
void drop(const at::Tensor& x, const FlashRuns& runs) {
  if (!runs.dropout) return;
  detail::drop_there(
      {}, x, x, runs.dropout,
      {.first_row = runs.first_query, .first_column = runs.first_key});
}

// e^(score - lse), in the scores' place; 0 of a query that sees no key.
at::Tensor shares_of(const at::Tensor& scores, const at::Tensor& lse) {
  return scores.sub_(lse.unsqueeze(-1))
      .exp_()
      .mul_((lse > kUnseen / 2).unsqueeze(-1));
}

std::tuple<at::Tensor, at::Tensor> attend_some(const at::Tensor& q,
                                               const at::Tensor& k,
                                               const at::Tensor& v,
                                               const FlashRuns& runs) {
  const at::Tensor scores = scores_of(q, k, runs);
  at::Tensor lse = at::logsumexp(scores, -1);
  lse = at::where(lse > kUnseen / 2, lse, kUnseen);
  const at::Tensor p = shares_of(scores, lse);
  drop(p, runs);
  const at::Tensor out =
      at::matmul(by_kv_head(p, k.size(1)), v.to(wide_type(v)));
  return {out.view(q.sizes()), lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_some_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs) {
  const int64_t heads = k.size(1);
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor p = shares_of(scores_of(q, k, runs), lse);
  const at::Tensor gradients = by_kv_head(gradient, heads);
  const at::Tensor along = (gradients * by_kv_head(out, heads)).sum(-1, true);
  at::Tensor kept = runs.dropout ? p.clone() : p;
  drop(kept, runs);
  at::Tensor dv =
      at::matmul(by_kv_head(kept, heads).transpose(2, 3), gradients);
  kept = at::Tensor();
  const at::Tensor dp =
      at::matmul(gradients, v.to(wide_type(v)).transpose(2, 3));
  drop(dp.view(p.sizes()), runs);
  const at::Tensor ds = dp.sub_(along).mul_(by_kv_head(p, heads)).mul_(scale);
  return {at::matmul(ds, k.to(wide_type(k))).view(q.sizes()),
          at::matmul(ds.transpose(2, 3), by_kv_head(q, heads)), dv};
}

// What some of the samples give, put together: of(from, count, runs of them).
template <size_t N, typename Of>
std::array<at::Tensor, N> by_samples(const at::Tensor& q, const at::Tensor& k,
                                     const FlashRuns& runs, const Of& of) {
  const int64_t samples = q.size(0);
  const int64_t step =
      samples_at_once(samples, q.size(1) * q.size(2) * k.size(2));
  std::array<std::vector<at::Tensor>, N> parts;
  for (int64_t from = 0; from < samples; from += step) {
    FlashRuns here = runs;
    here.dropout.first_sample += from;
    const std::array<at::Tensor, N> given =
        of(from, std::min(step, samples - from), here);
    for (size_t i = 0; i < N; ++i) parts[i].push_back(given[i]);
  }
  std::array<at::Tensor, N> all;
  for (size_t i = 0; i < N; ++i) {
    all[i] = parts[i].size() == 1 ? parts[i].front() : at::cat(parts[i]);
    parts[i].clear();
  }
  return all;
}

}  // namespace

int64_t samples_at_once(int64_t samples, int64_t scores) {
  constexpr int64_t kMost = int64_t{1} << 26;
  return std::clamp<int64_t>(kMost / scores, 1, samples);
}

std::tuple<at::Tensor, at::Tensor> composed_attention(const at::Tensor& q,
                                                      const at::Tensor& k,
                                                      const at::Tensor& v,
                                                      const FlashRuns& runs) {
  const at::NoGradGuard no_grad;
  const auto of = [&](int64_t from, int64_t count, const FlashRuns& here) {
    auto [out, lse] =
        attend_some(q.narrow(0, from, count), k.narrow(0, from, count),
                    v.narrow(0, from, count), here);
    return std::array{std::move(out), std::move(lse)};
  };
  auto [out, lse] = by_samples<2>(q, k, runs, of);
  return {std::move(out), std::move(lse)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> composed_attention_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs) {
  const at::NoGradGuard no_grad;
  const auto of = [&](int64_t from, int64_t count, const FlashRuns& here) {
    const auto part = [&](const at::Tensor& x) {
      return x.narrow(0, from, count);
    };
    auto [dq, dk, dv] = attend_some_backward(
        part(gradient), part(q), part(k), part(v), part(out), part(lse), here);
    return std::array{std::move(dq), std::move(dk), std::move(dv)};
  };
  auto [dq, dk, dv] = by_samples<3>(q, k, runs, of);
  return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace tessera::nn
