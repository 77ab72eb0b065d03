// What products do not keep is made again with the same bits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/detail/remade.h"
#include "tessera/nn/matmul.h"

namespace tessera::nn {
namespace {

constexpr int64_t kRows = 6, kWidth = 64, kOut = 48;

at::Tensor random(std::vector<int64_t> shape, at::ScalarType type) {
  return at::randn(shape, type).requires_grad_(true);
}

// What a product's input is made by, of x and a second tensor of its shape.
struct Case {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& other)> make;
};

std::vector<Case> cases() {
  const auto row = [](const at::Tensor& x) { return x.detach()[0]; };
  return {
      {"rms_norm",
       [row](const at::Tensor& x, const at::Tensor& other) {
         return detail::RmsNorm::apply(x, row(other), 1e-5);
       }},
      {"rms_norm_branch",
       [row](const at::Tensor& x, const at::Tensor& other) {
         return detail::RmsNormBranch::apply(x, row(other), 1e-5)[1];
       }},
      {"rms_norm_plus_one",
       [row](const at::Tensor& x, const at::Tensor& other) {
         return detail::RmsNorm::apply(x, row(other), 1e-5, 1.0);
       }},
      {"rms_norm_plus_one_branch",
       [row](const at::Tensor& x, const at::Tensor& other) {
         return detail::RmsNormBranch::apply(x, row(other), 1e-5, 1.0)[1];
       }},
      {"layer_norm",
       [row](const at::Tensor& x, const at::Tensor& other) {
         return detail::LayerNorm::apply(x, row(other), row(other), 1e-5);
       }},
      {"swiglu",
       [](const at::Tensor& x, const at::Tensor& other) {
         return activated(MlpKind::kSwiGlu, x, other);
       }},
      {"geglu",
       [](const at::Tensor& x, const at::Tensor& other) {
         return activated(MlpKind::kGeGlu, x, other);
       }},
      {"gelu",
       [](const at::Tensor& x, const at::Tensor& other) {
         return activated(MlpKind::kGelu, {}, x);
       }},
  };
}

class Remade
    : public ::testing::TestWithParam<std::pair<Case, at::ScalarType>> {
 protected:
  void SetUp() override {
    at::manual_seed(11);
    x = random({kRows, kWidth}, type());
    other = random({kRows, kWidth}, type());
    weight = random({kOut, kWidth}, type());
    dy = at::randn({kRows, kOut}, type());
  }
  at::ScalarType type() const { return GetParam().second; }
  at::Tensor make() const { return GetParam().first.make(x, other); }

  at::Tensor x, other, weight, dy;
};

TEST_P(Remade, TheProductLetsGoOfItsInput) {
  at::Tensor input = make();
  const c10::weak_intrusive_ptr<at::TensorImpl> held(input.getIntrusivePtr());
  const at::Tensor y = linear_product(input, weight);
  input = at::Tensor();
  EXPECT_TRUE(held.expired());
}

TEST_P(Remade, GradientsHaveTheBitsOfAnInputThatIsKept) {
  const at::Tensor kept = make();
  // No node made this one.
  const at::Tensor leaf = kept.detach().requires_grad_(true);
  linear_product(leaf, weight).backward(dy);
  const at::Tensor wanted = std::exchange(weight.mutable_grad(), {});
  kept.backward(leaf.grad());
  const at::Tensor wanted_x = std::exchange(x.mutable_grad(), {});

  linear_product(make(), weight).backward(dy);
  EXPECT_TRUE(at::equal(weight.grad(), wanted));
  EXPECT_TRUE(at::equal(x.grad(), wanted_x));
}

// The input's part first, as a schedule may have it, then the weight's.
TEST_P(Remade, InTwoParts) {
  const at::Tensor leaf = make().detach();
  linear_product(leaf, weight).backward(dy);
  const at::Tensor wanted = std::exchange(weight.mutable_grad(), {});

  const at::Tensor y = linear_product(make(), weight);
  torch::autograd::backward({y}, {dy}, /*retain_graph=*/true, false, {x});
  EXPECT_FALSE(weight.grad().defined());
  torch::autograd::backward({y}, {dy}, /*retain_graph=*/false, false, {weight});
  EXPECT_TRUE(at::equal(weight.grad(), wanted));
}

// Two products of one input, as layers that are not joined.
TEST_P(Remade, OfTwoProducts) {
  const at::Tensor leaf = make().detach();
  (linear_product(leaf, weight) * linear_product(leaf, weight)).backward(dy);
  const at::Tensor wanted = std::exchange(weight.mutable_grad(), {});
  const at::Tensor input = make();
  (linear_product(input, weight) * linear_product(input, weight)).backward(dy);
  EXPECT_TRUE(at::equal(weight.grad(), wanted));
}

std::vector<std::pair<Case, at::ScalarType>> of_types() {
  std::vector<std::pair<Case, at::ScalarType>> all;
  for (const Case& each : cases()) {
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      all.emplace_back(each, type);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Makers, Remade, ::testing::ValuesIn(of_types()),
                         [](const auto& each) {
                           return std::string(each.param.first.name) + "_" +
                                  c10::toString(each.param.second);
                         });

// What was changed since it was made is kept as it is.
TEST(RemadeNot, WhatWasChangedInPlace) {
  at::manual_seed(11);
  const at::Tensor x = random({kRows, kWidth}, at::kDouble);
  const at::Tensor weight = random({kOut, kWidth}, at::kDouble);
  const at::Tensor input = activated(MlpKind::kGelu, {}, x).add_(1);
  const at::Tensor dy = at::randn({kRows, kOut}, at::kDouble);
  linear_product(input, weight).backward(dy);
  EXPECT_TRUE(at::allclose(weight.grad(), dy.t().mm(at::gelu(x, "tanh") + 1)));
}

TEST(RemadeNot, WhatWasChangedUnheard) {
  at::manual_seed(11);
  const at::Tensor x = random({kRows, kWidth}, at::kDouble);
  const at::Tensor weight = random({kOut, kWidth}, at::kDouble);
  const at::Tensor input = activated(MlpKind::kGelu, {}, x);
  {
    const at::NoGradGuard no_grad;
    input.add_(1);
  }
  const at::Tensor dy = at::randn({kRows, kOut}, at::kDouble);
  linear_product(input, weight).backward(dy);
  EXPECT_TRUE(at::allclose(weight.grad(), dy.t().mm(at::gelu(x, "tanh") + 1)));
}

// d/dx of |dL/dW|^2, by way of what is made again.
TEST(RemadeTwice, SecondDerivativesAreThoseOfLibTorch) {
  at::manual_seed(11);
  const at::Tensor x = random({kRows, kWidth}, at::kDouble);
  const at::Tensor weight = random({kOut, kWidth}, at::kDouble);
  const at::Tensor row = at::randn({kWidth}, at::kDouble);
  const auto second = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {weight}, {},
                                             /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x})[0];
  };
  EXPECT_TRUE(at::allclose(
      second(linear_product(activated(MlpKind::kGelu, {}, x), weight)),
      second(at::mm(at::gelu(x, "tanh"), weight.t()))));
  EXPECT_TRUE(at::allclose(
      second(
          linear_product(detail::LayerNorm::apply(x, row, row, 1e-5), weight)),
      second(at::mm(at::layer_norm(x, {kWidth}, row, row, 1e-5), weight.t()))));
}

TEST(RemadeTwice, LoopsOfOurOwnRefuse) {
  at::manual_seed(11);
  const at::Tensor x = random({kRows, kWidth}, at::kDouble);
  const at::Tensor weight = random({kOut, kWidth}, at::kDouble);
  for (const at::Tensor& input :
       {activated(MlpKind::kSwiGlu, x, x), activated(MlpKind::kGeGlu, x, x),
        detail::RmsNorm::apply(x, at::ones({kWidth}, at::kDouble), 1e-5)}) {
    EXPECT_THROW(
        torch::autograd::grad({linear_product(input, weight).sum()}, {x}, {},
                              /*retain_graph=*/true, /*create_graph=*/true),
        Error);
  }
}

}  // namespace
}  // namespace tessera::nn
