// Causal attention, whose scores are never all in memory. B, T, H, E as in
// nn/flash_attention.h.
#include <ATen/ATen.h>

#include <cmath>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/flash_attention.h"

namespace tessera::benchmark::kernels {
namespace {

constexpr int64_t kSamples = 8, kTokens = 256, kHeads = 8, kWidth = 64;

at::Tensor by_operator(const Pair::Inputs& in) {
  return at::scaled_dot_product_attention(
             in[0].transpose(1, 2), in[1].transpose(1, 2),
             in[2].transpose(1, 2), /*attn_mask=*/{}, /*dropout_p=*/0.0,
             /*is_causal=*/true)
      .transpose(1, 2);
}

at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }
at::Tensor across(const at::Tensor& x) { return x.transpose(2, 3); }

// The formulas of nn/flash_attention.h in fp64, over (B, H, T, E), and with
// absolute values where they sum.
struct Exact {
  explicit Exact(const Pair::Inputs& in)
      : q(heads_first(wide(in[0])) / std::sqrt(double{kWidth})),
        k(heads_first(wide(in[1]))),
        v(heads_first(wide(in[2]))),
        weights(at::matmul(q, across(k))) {
    const at::Tensor future =
        at::ones({kTokens, kTokens}, at::TensorOptions(at::kBool)).triu(1);
    weights = weights.masked_fill_(future, -INFINITY).softmax(-1);
  }

  std::vector<Reference> forward() const {
    return {of_product(weights, weights, v)};
  }

  std::vector<Reference> backward(const at::Tensor& gradient) const {
    const at::Tensor dy = heads_first(wide(gradient));
    const at::Tensor out = dy * at::matmul(weights, v);
    const at::Tensor slopes =
        weights * (at::matmul(dy, across(v)) - out.sum(-1, true));
    const at::Tensor most = weights * (at::matmul(dy.abs(), across(v).abs()) +
                                       out.abs().sum(-1, true));
    return {of_product(slopes, most, k / std::sqrt(double{kWidth})),
            of_product(across(slopes), across(most), q),
            of_product(across(weights), across(weights), dy)};
  }

  // `most`: the absolute values that each of `a` is a sum of.
  static Reference of_product(const at::Tensor& a, const at::Tensor& most,
                              const at::Tensor& b) {
    return {heads_first(at::matmul(a, b)),
            heads_first(at::matmul(most, b.abs()))};
  }

  at::Tensor q, k, v, weights;
};

struct AttentionNumbers {
  explicit AttentionNumbers(at::ScalarType type)
      : dtype(type), dy(random_tensor(kShape, type, 4)) {
    for (const uint64_t seed : {1, 2, 3}) {
      pair.inputs.push_back(leaf(kShape, type, seed));
    }
    pair.ours = [](const Pair::Inputs& in) {
      return nn::flash_attention(in[0], in[1], in[2]);
    };
    pair.libtorch = by_operator;
  }

  // Of `flops` for each pair of tokens that is seen and each of E.
  Contest contest(const char* kernel, int64_t flops) const {
    const int64_t pairs = kSamples * kHeads * kTokens * (kTokens + 1) / 2;
    return {.kernel = kernel,
            .dtype = dtype,
            .shape = c10::str(kSamples, "x", kTokens, "x", kHeads, "x", kWidth),
            .flops = static_cast<double>(flops * pairs * kWidth),
            .most_ulps = dtype == at::kFloat ? 16.0 : 2.0};
  }

  static constexpr int64_t kShape[] = {kSamples, kTokens, kHeads, kWidth};
  at::ScalarType dtype;
  at::Tensor dy;
  Pair pair;
};

Contest attention(at::ScalarType dtype) {
  const AttentionNumbers of(dtype);
  Contest contest = of.contest("attention", 4);
  contest.wanted = [of] { return Exact(of.pair.inputs).forward(); };
  return of.pair.forward(std::move(contest));
}

Contest attention_backward(at::ScalarType dtype) {
  const AttentionNumbers of(dtype);
  Contest contest = of.contest("attention_backward", 10);
  contest.wanted = [of] { return Exact(of.pair.inputs).backward(of.dy); };
  return of.pair.backward(std::move(contest), of.dy);
}

}  // namespace

std::vector<MakeContest> attention_contests() {
  return {attention, attention_backward};
}

}  // namespace tessera::benchmark::kernels
