#include "tessera/nn/blocks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/parameter.h"
#include "tests/support/gradients.h"

namespace tessera::nn {
namespace {

TEST(Linear, Gradients) {
  Linear linear({.in = 3, .out = 4, .bias = true});
  fill(linear);
  const auto x = input({2, 3});
  expect_all_gradients(linear, [&] { return linear.forward(x); }, x);
}

TEST(Norm, RmsNormsAreTheirFormulasAndHaveTheirGradients) {
  for (const auto kind : {NormKind::kRmsNorm, NormKind::kRmsNormPlusOne}) {
    Norm norm(kind, 5, 1e-5);
    fill(norm);
    const auto x = input({2, 3, 5});
    const auto weight = parameters_of(norm)[0].tensor;
    const auto by = kind == NormKind::kRmsNorm ? weight : weight + 1;
    const auto expected = x * (x.pow(2).mean(-1, true) + 1e-5).rsqrt() * by;
    EXPECT_TRUE(at::allclose(norm.forward(x), expected, 1e-13, 1e-13));
    expect_all_gradients(norm, [&] { return norm.forward(x); }, x);
    const auto both = [&] {
      const auto [past, normed] = norm.branch(x);
      return past * 3 + normed;
    };
    EXPECT_TRUE(at::allclose(both(), x * 3 + expected, 1e-13, 1e-13));
    expect_all_gradients(norm, both, x);
  }
}

// What one of both outputs is not used for costs nothing.
TEST(Norm, ABranchMayBeUsedInPart) {
  Norm norm(NormKind::kRmsNorm, 5, 1e-5);
  fill(norm);
  const auto x = input({2, 3, 5});
  expect_all_gradients(norm, [&] { return norm.branch(x).second; }, x);
  norm.branch(x).first.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones_like(x)));
  EXPECT_FALSE(parameters_of(norm)[0].tensor.grad().defined());
}

TEST(Norm, RefusesAWeightOfAnotherWidthOrType) {
  Norm norm(NormKind::kRmsNorm, 5, 1e-5);
  fill(norm);
  EXPECT_THROW(norm.forward(at::ones({2, 6}, kWide)), tessera::Error);
  EXPECT_THROW(norm.forward(at::ones({2, 5}, at::kFloat)), tessera::Error);
}

TEST(Norm, BeginsAsThatOfAWeightOfOne) {
  Norm norm(NormKind::kRmsNormPlusOne, 5, 1e-5);
  materialise(norm, {.dtype = at::kDouble});
  EXPECT_EQ(parameters_of(norm)[0].tensor.abs().max().item<double>(), 0);
  Norm plain(NormKind::kRmsNorm, 5, 1e-5);
  materialise(plain, {.dtype = at::kDouble});
  const auto x = input({2, 5});
  EXPECT_TRUE(at::equal(norm.forward(x), plain.forward(x)));
}

// As if another rank had the same part of the width.
TEST(Norm, RmsNormInARegionTakesTheMeanOverItsRanks) {
  Norm alone(NormKind::kRmsNorm, 5, 1e-5), shared(NormKind::kRmsNorm, 5, 1e-5);
  fill(alone);
  fill(shared);
  const auto twice = [](const at::Tensor& x) { return 2 * x; };
  const auto same = [](const at::Tensor& x) { return x; };
  shared.set_region({.enter = same, .leave = twice, .ranks = 2});
  const auto x = input({2, 3, 5});
  parameters_of(shared)[0].tensor.detach().copy_(
      parameters_of(alone)[0].tensor.detach());
  EXPECT_TRUE(at::allclose(shared.forward(x), alone.forward(x), 1e-13, 1e-13));
  expect_all_gradients(shared, [&] { return shared.forward(x); }, x);
}

TEST(Norm, LayerNormGradients) {
  Norm norm(NormKind::kLayerNorm, 5, 1e-5);
  fill(norm);
  const auto x = input({2, 5});
  expect_all_gradients(norm, [&] { return norm.forward(x); }, x);
}

TEST(Norm, LowPrecisionComputesInFloat) {
  // Half a unit at 4 is 0.016 and 0.002.
  for (const auto& [type, bound] :
       {std::pair{at::kBFloat16, 0.02}, {at::kHalf, 0.0025}}) {
    for (const auto kind : {NormKind::kRmsNorm, NormKind::kRmsNormPlusOne,
                            NormKind::kLayerNorm}) {
      Norm narrow(kind, 64, 1e-5), wide(kind, 64, 1e-5);
      materialise(narrow, {.dtype = type});
      materialise(wide, {.dtype = at::kDouble});
      const auto x = at::randn({16, 64}).to(type);
      const auto error =
          (narrow.forward(x).to(at::kDouble) - wide.forward(x.to(at::kDouble)))
              .abs()
              .max();
      EXPECT_LT(error.item<double>(), bound);
    }
  }
}

TEST(Mlp, GradientsOfAllKinds) {
  for (const auto kind : {MlpKind::kGelu, MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    Mlp mlp({.kind = kind, .width = 3, .hidden = 5, .bias = true});
    fill(mlp);
    const auto x = input({2, 2, 3});
    expect_all_gradients(mlp, [&] { return mlp.forward(x); }, x);
  }
}

TEST(Mlp, GatesAreThoseOfLibTorch) {
  const auto gate = input({3, 4}), up = input({3, 4});
  const auto dy = at::randn({3, 4}, kWide);
  for (const auto kind : {MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    const auto plain =
        (kind == MlpKind::kSwiGlu ? at::silu(gate) : at::gelu(gate, "tanh")) *
        up;
    const auto ours = activated(kind, gate, up);
    EXPECT_TRUE(at::allclose(ours, plain, 1e-13, 1e-13));
    const auto wanted = torch::autograd::grad({plain}, {gate, up}, {dy});
    const auto found = torch::autograd::grad({ours}, {gate, up}, {dy});
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12, 1e-12));
    }
  }
}

TEST(Mlp, GatesThatDoNotFitAreRefused) {
  const auto up = at::ones({3, 4}, kWide);
  for (const auto kind : {MlpKind::kSwiGlu, MlpKind::kGeGlu}) {
    EXPECT_THROW(activated(kind, at::ones({3, 1}, kWide), up), tessera::Error);
    EXPECT_THROW(activated(kind, at::ones({3, 4}), up), tessera::Error);
  }
}

TEST(Mlp, GeluIsTheTanhForm) {
  Mlp mlp({.kind = MlpKind::kGelu, .width = 1, .hidden = 1});
  materialise(mlp, {.dtype = at::kDouble});
  for (auto& parameter : parameters_of(mlp)) {
    const at::NoGradGuard no_grad;
    parameter.tensor.fill_(1.0);
  }
  const double x = 0.7;
  const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  EXPECT_NEAR(mlp.forward(at::full({1, 1, 1}, x, kWide)).item<double>(),
              0.5 * x * (1 + std::tanh(inner)), 1e-15);
}

}  // namespace
}  // namespace tessera::nn
