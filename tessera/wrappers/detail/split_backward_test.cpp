#include "tessera/wrappers/detail/split_backward.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace tessera::wrappers {
namespace {

namespace nn = torch::nn;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

// Products of matrices and convolutions' gradients that an operation computes.
int64_t products_of(const std::function<void()>& operation) {
  thread_local int64_t products;
  products = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& each)
                                     -> std::unique_ptr<at::ObserverContext> {
        const std::string_view name = each.name();
        if (name == "aten::mm" || name == "aten::addmm" ||
            name == "aten::bmm") {
          ++products;
        }
        return nullptr;
      }));
  operation();
  at::removeCallback(handle);
  return products;
}

struct Gradients {
  at::Tensor input;
  std::map<std::string, at::Tensor> parameters;
};

Gradients gradients_of(nn::Module& module, const at::Tensor& input) {
  Gradients found{.input = input.grad(), .parameters = {}};
  for (const auto& each : module.named_parameters()) {
    found.parameters[each.key()] = each.value().grad();
  }
  module.zero_grad();
  return found;
}

void expect_alike(const Gradients& found, const Gradients& wanted) {
  EXPECT_TRUE(at::equal(found.input, wanted.input));
  for (const auto& [name, gradient] : wanted.parameters) {
    const at::Tensor& mine = found.parameters.at(name);
    ASSERT_EQ(mine.defined(), gradient.defined()) << name;
    if (gradient.defined()) {
      EXPECT_TRUE(at::allclose(mine, gradient, 1e-14, 1e-14)) << name;
    }
  }
}

struct Parts {
  int64_t first = 0, second = 0;  // products in each
};

// The two parts against a whole backward.
Parts expect_as_whole(nn::Module& module, const Forward& forward,
                      const at::Tensor& x) {
  const auto leaf = [&] { return x.clone().requires_grad_(); };
  at::Tensor input = leaf();
  const at::Tensor whole = forward(input);
  const at::Tensor gradient =
      at::arange(whole.numel(), x.options()).sin().reshape(whole.sizes());
  whole.backward(gradient);
  const Gradients wanted = gradients_of(module, input);

  input = leaf();
  at::Tensor end = forward(input);
  Parts parts;
  PutOffGradients later;
  parts.first = products_of(
      [&] { later = backward_to_inputs({end}, {gradient}, {input}); });
  end = at::Tensor();
  const auto between = input.grad().clone();
  EXPECT_TRUE(at::equal(between, wanted.input));
  parts.second = products_of([&] { later.run(); });
  expect_alike(gradients_of(module, input), wanted);
  return parts;
}

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble)
      .mul(0.7)
      .cos()
      .reshape(sizes);
}

TEST(SplitBackward, WeightsOfLinearsWait) {
  nn::Sequential net(nn::Linear(6, 8), nn::Tanh(),
                     nn::LayerNorm(nn::LayerNormOptions({8})),
                     nn::Linear(nn::LinearOptions(8, 8).bias(false)),
                     nn::GELU(), nn::Linear(8, 3));
  net->to(at::kDouble);
  const auto forward = [&](const at::Tensor& x) { return net->forward(x); };
  for (const at::Tensor& x : {numbers({5, 6}), numbers({2, 5, 6})}) {
    const Parts parts = expect_as_whole(*net, forward, x);
    EXPECT_EQ(parts.first, 3);
    EXPECT_EQ(parts.second, 3);
  }
}

TEST(SplitBackward, NothingIsAddedInTheFirstPart) {
  nn::Sequential net(nn::Linear(6, 8),
                     nn::LayerNorm(nn::LayerNormOptions({8})));
  const auto input = at::ones({4, 6}).requires_grad_();
  auto later =
      backward_to_inputs({net->forward(input).sum()}, {at::Tensor()}, {input});
  for (const auto& each : net->parameters()) {
    EXPECT_FALSE(each.grad().defined());
  }
  later.run();
  for (const auto& each : net->parameters()) {
    EXPECT_TRUE(each.grad().defined());
  }
}

// pytorch#180952.
TEST(SplitBackward, AWeightUsedTwiceCountsTwice) {
  nn::Linear linear(6, 6);
  linear->to(at::kDouble);
  const Parts parts = expect_as_whole(
      *linear, [&](const at::Tensor& x) { return linear(at::tanh(linear(x))); },
      numbers({5, 6}));
  EXPECT_EQ(parts.first, 2);
  EXPECT_EQ(parts.second, 2);
}

// A bias that a product and another operator add to is early in both.
TEST(SplitBackward, WhatIsSharedWithAnotherOperatorComesInOnePart) {
  nn::Sequential net(nn::Linear(6, 6), nn::Linear(6, 6));
  net->to(at::kDouble);
  const at::Tensor shared = net->named_parameters()["0.bias"];
  const Parts parts = expect_as_whole(
      *net, [&](const at::Tensor& x) { return net->forward(x * shared); },
      numbers({5, 6}));
  EXPECT_EQ(parts.first, 3);
  EXPECT_EQ(parts.second, 1);
}

TEST(SplitBackward, ConvolutionsAndBatchNorm) {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)),
                     nn::BatchNorm2d(4), nn::ReLU(),
                     nn::Conv2d(nn::Conv2dOptions(4, 2, 3).bias(false)));
  net->to(at::kDouble);
  expect_as_whole(
      *net, [&](const at::Tensor& x) { return net->forward(x); },
      numbers({2, 3, 6, 6}));
}

TEST(SplitBackward, LongRecurrences) {
  nn::LSTM lstm(nn::LSTMOptions(4, 5).num_layers(2).batch_first(true));
  lstm->to(at::kDouble);
  const Parts parts = expect_as_whole(
      *lstm, [&](const at::Tensor& x) { return std::get<0>(lstm->forward(x)); },
      numbers({2, 7, 4}));
  EXPECT_GT(parts.second, 0);
}

// Masked parameters: what they are made of is behind both.
TEST(SplitBackward, WeightsThatAreMadeOfOthers) {
  nn::Linear linear(6, 6);
  linear->to(at::kDouble);
  const Parts parts = expect_as_whole(
      *linear,
      [&](const at::Tensor& x) {
        const at::Tensor weight = linear->weight * 2;
        return at::linear(at::linear(x, weight, linear->bias).tanh(), weight);
      },
      numbers({5, 6}));
  EXPECT_EQ(parts.second, 2);
}

TEST(SplitBackward, RunsWholeBesideHooks) {
  nn::Sequential net(nn::Linear(6, 6),
                     nn::LayerNorm(nn::LayerNormOptions({6})));
  net->to(at::kDouble);
  int calls = 0;
  net->parameters()[3].register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient;
  });
  const Parts parts = expect_as_whole(
      *net, [&](const at::Tensor& x) { return net->forward(x); },
      numbers({5, 6}));
  EXPECT_EQ(parts.second, 0);
  EXPECT_EQ(calls, 2);
}

TEST(SplitBackward, AStageThatDoesNotComputeWithItsInput) {
  nn::Linear linear(6, 6);
  const auto input = at::ones({4, 6}).requires_grad_();
  auto later = backward_to_inputs({linear(at::ones({4, 6})).sum()},
                                  {at::Tensor()}, {input});
  later.run();
  EXPECT_TRUE(linear->weight.grad().defined());
  EXPECT_FALSE(input.grad().defined());
}

}  // namespace
}  // namespace tessera::wrappers
