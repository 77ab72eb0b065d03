// Kernels that go once over memory: the norm, rotations, the gate of the MLP.
// N tokens, D model width, F width of the MLP; B, T, H, E as in nn/blocks.h.
#include <ATen/ATen.h>

#include <memory>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/rotary.h"

namespace tessera::benchmark::kernels {
namespace {

constexpr int64_t kSamples = 4, kTokens = 512, kHeads = 8, kHeadDim = 64;
constexpr int64_t kRows = kSamples * kTokens, kWidth = kHeads * kHeadDim;
constexpr int64_t kHidden = 1408;
constexpr double kEps = 1e-5;

double most_ulps(at::ScalarType dtype) { return dtype == at::kFloat ? 16 : 1; }

// Passes over a tensor of so many elements.
double bytes_of(double passes, int64_t numel, at::ScalarType dtype) {
  return passes * static_cast<double>(numel) *
         static_cast<double>(c10::elementSize(dtype));
}

struct NormNumbers {
  explicit NormNumbers(at::ScalarType dtype)
      : x(leaf({kRows, kWidth}, dtype, 1)),
        norm(std::make_shared<nn::Norm>(nn::NormKind::kRmsNorm, kWidth, kEps)) {
    nn::materialise(*norm, {.dtype = dtype});
    weight = nn::parameters_of(*norm).at(0).tensor;
    const at::NoGradGuard no_grad;
    weight.copy_(random_tensor({kWidth}, dtype, 2));
  }

  Pair pair() const {
    return {
        .inputs = {x, weight},
        .ours = [norm = norm](const auto& in) { return norm->forward(in[0]); },
        .libtorch =
            [](const auto& in) {
              return at::rms_norm(in[0], {kWidth}, in[1], kEps);
            }};
  }

  Contest contest(const char* kernel, double passes) const {
    return {.kernel = kernel,
            .dtype = x.scalar_type(),
            .shape = c10::str(kRows, "x", kWidth),
            .bytes = bytes_of(passes, x.numel(), x.scalar_type()),
            .most_ulps = most_ulps(x.scalar_type())};
  }

  at::Tensor scale() const {
    return at::rsqrt(wide(x).square().mean(-1, true) + kEps);
  }

  at::Tensor x, weight;
  std::shared_ptr<nn::Norm> norm;
};

Contest rms_norm(at::ScalarType dtype) {
  const NormNumbers of(dtype);
  Contest contest = of.contest("rms_norm", 2);
  contest.wanted = [of]() -> std::vector<Reference> {
    const at::Tensor y = wide(of.x) * of.scale() * wide(of.weight);
    return {{y, y.abs()}};
  };
  return of.pair().forward(std::move(contest));
}

// dx = s w dy - x s^3 / D sum(w dy x), dw = sum over rows of dy x s.
Contest rms_norm_backward(at::ScalarType dtype) {
  const NormNumbers of(dtype);
  const at::Tensor dy = random_tensor({kRows, kWidth}, dtype, 3);
  Contest contest = of.contest("rms_norm_backward", 3);
  contest.wanted = [of, dy]() -> std::vector<Reference> {
    const at::Tensor x = wide(of.x), s = of.scale();
    const at::Tensor g = wide(dy) * wide(of.weight);
    const at::Tensor pull = x * s.pow(3) / kWidth, along = g * x;
    const at::Tensor dweight = wide(dy) * x * s;
    return {{g * s - pull * along.sum(-1, true),
             (g * s).abs() + pull.abs() * along.abs().sum(-1, true)},
            {dweight.sum(0), dweight.abs().sum(0)}};
  };
  return of.pair().backward(std::move(contest), dy);
}

// As it is often written: x cos + (-x2, x1) sin, of x's own type.
at::Tensor rotated_by_operators(const at::Tensor& x, const at::Tensor& cos,
                                const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

Contest rotary(at::ScalarType dtype) {
  const at::Tensor x =
      random_tensor({kSamples, kTokens, kHeads, kHeadDim}, dtype, 4);
  nn::RotaryTable table(kHeadDim, 10000.0);
  const nn::Rotation rotation = table.rows(0, kTokens, x);
  const auto of_heads = [](const at::Tensor& angles) {
    return at::cat({angles, angles}, -1).unsqueeze(1);  // (T, 1, E)
  };
  const at::Tensor cos = of_heads(rotation.cos), sin = of_heads(rotation.sin);
  Contest contest{
      .kernel = "rotary",
      .dtype = dtype,
      .shape = c10::str(kSamples, "x", kTokens, "x", kHeads, "x", kHeadDim),
      .bytes = bytes_of(2, x.numel(), dtype),
      .most_ulps = most_ulps(dtype)};
  contest.wanted = [=]() -> std::vector<Reference> {
    const at::Tensor c = wide(cos), s = wide(sin), all = wide(x);
    const at::Tensor turned = rotated_by_operators(all, at::zeros_like(c), s);
    return {{all * c + turned, (all * c).abs() + turned.abs()}};
  };
  const at::Tensor narrow_cos = cos.to(dtype), narrow_sin = sin.to(dtype);
  const Pair pair{
      .inputs = {x},
      .ours =
          [rotation](const auto& in) { return nn::rotate(in[0], rotation); },
      .libtorch =
          [=](const auto& in) {
            return rotated_by_operators(in[0], narrow_cos, narrow_sin);
          }};
  return pair.forward(std::move(contest));
}

Pair swiglu_pair(at::ScalarType dtype) {
  return {.inputs = {leaf({kRows, kHidden}, dtype, 5),
                     leaf({kRows, kHidden}, dtype, 6)},
          .ours =
              [](const auto& in) {
                return nn::activated(nn::MlpKind::kSwiGlu, in[0], in[1]);
              },
          .libtorch = [](const auto& in) { return at::silu(in[0]) * in[1]; }};
}

Contest activation_contest(const char* kernel, at::ScalarType dtype,
                           double passes) {
  return {.kernel = kernel,
          .dtype = dtype,
          .shape = c10::str(kRows, "x", kHidden),
          .bytes = bytes_of(passes, kRows * kHidden, dtype),
          .most_ulps = most_ulps(dtype)};
}

Contest swiglu(at::ScalarType dtype) {
  const Pair pair = swiglu_pair(dtype);
  Contest contest = activation_contest("swiglu", dtype, 3);
  contest.wanted = [in = pair.inputs]() -> std::vector<Reference> {
    const at::Tensor y = at::silu(wide(in[0])) * wide(in[1]);
    return {{y, y.abs()}};
  };
  return pair.forward(std::move(contest));
}

// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s; s = sigmoid(gate).
Contest swiglu_backward(at::ScalarType dtype) {
  const Pair pair = swiglu_pair(dtype);
  const at::Tensor dy = random_tensor({kRows, kHidden}, dtype, 7);
  Contest contest = activation_contest("swiglu_backward", dtype, 5);
  contest.wanted = [in = pair.inputs, dy]() -> std::vector<Reference> {
    const at::Tensor gate = wide(in[0]), s = at::sigmoid(gate);
    const at::Tensor g = wide(dy) * wide(in[1]) * s, inner = gate * (1 - s);
    const at::Tensor dup = wide(dy) * gate * s;
    return {{g * (1 + inner), g.abs() * (1 + inner.abs())}, {dup, dup.abs()}};
  };
  return pair.backward(std::move(contest), dy);
}

Pair gelu_pair(at::ScalarType dtype) {
  return {.inputs = {leaf({kRows, kHidden}, dtype, 5)},
          .ours =
              [](const auto& in) {
                return nn::activated(nn::MlpKind::kGelu, {}, in[0]);
              },
          .libtorch = [](const auto& in) { return at::gelu(in[0], "tanh"); }};
}

// y = (x + x tanh u) / 2, whose terms differ where x is below 0.
Contest gelu(at::ScalarType dtype) {
  const Pair pair = gelu_pair(dtype);
  Contest contest = activation_contest("gelu", dtype, 2);
  contest.wanted = [in = pair.inputs]() -> std::vector<Reference> {
    const at::Tensor x = wide(in[0]);
    return {{at::gelu(x, "tanh"), x.abs()}};
  };
  return pair.forward(std::move(contest));
}

Contest gelu_backward(at::ScalarType dtype) {
  const Pair pair = gelu_pair(dtype);
  const at::Tensor dy = random_tensor({kRows, kHidden}, dtype, 7);
  Contest contest = activation_contest("gelu_backward", dtype, 3);
  contest.wanted = [in = pair.inputs, dy]() -> std::vector<Reference> {
    const at::Tensor x = wide(in[0]), g = wide(dy);
    return {{at::gelu_backward(g, x, "tanh"), g.abs() * (1 + x.abs())}};
  };
  return pair.backward(std::move(contest), dy);
}

}  // namespace

std::vector<MakeContest> pointwise_contests() {
  return {rms_norm, rms_norm_backward, rotary, swiglu, swiglu_backward,
          gelu,     gelu_backward};
}

}  // namespace tessera::benchmark::kernels
