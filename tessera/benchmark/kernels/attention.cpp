// Causal attention, whose scores are never all in memory, also of a window. B,
// T, H, E as in nn/flash_attention.h.
#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/flash_attention.h"

namespace tessera::benchmark::kernels {
namespace {

constexpr int64_t kHeads = 8, kWidth = 64;

struct Size {
  int64_t samples, tokens;
  int64_t window = 0;  // 0: none
};
constexpr Size kWhole = {8, 256}, kWindow = {1, 1024, 128};

at::Tensor mask_of(const Size& size) {
  return nn::seen_keys(size.tokens, size.window, at::TensorOptions());
}

Pair::Forward by_operator(const Size& size) {
  std::optional<at::Tensor> mask;
  if (size.window > 0) mask = mask_of(size);
  return [mask](const Pair::Inputs& in) {
    return at::scaled_dot_product_attention(
               in[0].transpose(1, 2), in[1].transpose(1, 2),
               in[2].transpose(1, 2), mask, /*dropout_p=*/0.0,
               /*is_causal=*/!mask)
        .transpose(1, 2);
  };
}

at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }
at::Tensor across(const at::Tensor& x) { return x.transpose(2, 3); }

// The formulas of nn/flash_attention.h in fp64, over (B, H, T, E), and with
// absolute values where they sum.
struct Exact {
  Exact(const Pair::Inputs& in, const Size& size)
      : q(heads_first(wide(in[0])) / std::sqrt(double{kWidth})),
        k(heads_first(wide(in[1]))),
        v(heads_first(wide(in[2]))),
        weights(at::matmul(q, across(k))) {
    weights = weights.masked_fill_(mask_of(size).logical_not(), -INFINITY)
                  .softmax(-1);
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
  AttentionNumbers(at::ScalarType type, const Size& of)
      : dtype(type), size(of) {
    const int64_t shape[] = {size.samples, size.tokens, kHeads, kWidth};
    dy = random_tensor(shape, type, 4);
    for (const uint64_t seed : {1, 2, 3}) {
      pair.inputs.push_back(leaf(shape, type, seed));
    }
    pair.ours = [window = size.window](const Pair::Inputs& in) {
      return nn::flash_attention(in[0], in[1], in[2], /*dropout=*/{}, window);
    };
    pair.libtorch = by_operator(size);
  }

  // Of `flops` for each pair of tokens that is seen and each of E.
  Contest contest(std::string kernel, int64_t flops) const {
    const auto [samples, tokens, window] = size;
    const int64_t unseen = window > 0 ? tokens - window : 0;  // by the last
    const int64_t pairs =
        (tokens * (tokens + 1) - unseen * (unseen + 1)) / 2 * samples * kHeads;
    return {.kernel = std::move(kernel),
            .dtype = dtype,
            .shape =
                c10::str(samples, "x", tokens, "x", kHeads, "x", kWidth,
                         window > 0 ? c10::str(" of ", window) : std::string()),
            .flops = static_cast<double>(flops * pairs * kWidth),
            .most_ulps = dtype == at::kFloat ? 16.0 : 2.0};
  }

  at::ScalarType dtype;
  Size size;
  at::Tensor dy;
  Pair pair;
};

Contest forward_of(const char* kernel, const Size& size, at::ScalarType dtype) {
  const AttentionNumbers of(dtype, size);
  Contest contest = of.contest(kernel, 4);
  contest.wanted = [of] { return Exact(of.pair.inputs, of.size).forward(); };
  return of.pair.forward(std::move(contest));
}

Contest backward_of(const char* kernel, const Size& size,
                    at::ScalarType dtype) {
  const AttentionNumbers of(dtype, size);
  Contest contest = of.contest(kernel, 10);
  contest.wanted = [of] {
    return Exact(of.pair.inputs, of.size).backward(of.dy);
  };
  return of.pair.backward(std::move(contest), of.dy);
}

Contest attention(at::ScalarType dtype) {
  return forward_of("attention", kWhole, dtype);
}
Contest attention_backward(at::ScalarType dtype) {
  return backward_of("attention_backward", kWhole, dtype);
}
Contest attention_window(at::ScalarType dtype) {
  return forward_of("attention_window", kWindow, dtype);
}
Contest attention_window_backward(at::ScalarType dtype) {
  return backward_of("attention_window_backward", kWindow, dtype);
}

}  // namespace

std::vector<MakeContest> attention_contests() {
  return {attention, attention_backward, attention_window,
          attention_window_backward};
}

}  // namespace tessera::benchmark::kernels
