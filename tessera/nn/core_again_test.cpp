#include "tessera/nn/core_again.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "tessera/nn/attention.h"
#include "tessera/nn/matmul.h"

namespace tessera::nn {
namespace {

struct Inputs {
  at::Tensor q, k, v, weight;
  std::vector<at::Tensor> all() const { return {q, k, v, weight}; }
};

Inputs inputs(at::ScalarType type) {
  at::manual_seed(5);
  const auto leaf = [&](at::IntArrayRef shape) {
    return at::randn(shape).to(type).requires_grad_(true);
  };
  return {leaf({2, 9, 4, 8}), leaf({2, 9, 2, 8}), leaf({2, 9, 2, 8}),
          leaf({6, 32})};
}

at::Tensor core(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return causal_attention(q, k, v, {}).flatten(2);
}

std::vector<at::Tensor> gradients(const Inputs& of) {
  std::vector<at::Tensor> all;
  for (const auto& each : of.all()) all.push_back(each.grad());
  return all;
}

TEST(CoreAgain, HasTheBitsOfTheCore) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const Inputs one = inputs(type), other = inputs(type);
    const at::Tensor plain =
        linear_product(core(one.q, one.k, one.v), one.weight);
    plain.pow(2).sum().backward();

    CoreAgain again;
    const at::Tensor y = again.forward(core, other.q, other.k, other.v);
    const at::Tensor z = linear_product(y, other.weight);
    again.let_go();
    EXPECT_EQ(y.storage().nbytes(), 0);
    EXPECT_TRUE(at::equal(plain, z));
    again.compute();
    EXPECT_EQ(y.storage().nbytes(), y.nbytes());
    z.pow(2).sum().backward();
    const auto expected = gradients(one), found = gradients(other);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(expected[i], found[i])) << type << " " << i;
    }
  }
}

// As a backward in two parts has it.
TEST(CoreAgain, GoesBackwardTwice) {
  const Inputs of = inputs(at::kFloat);
  CoreAgain again;
  const at::Tensor z =
      linear_product(again.forward(core, of.q, of.k, of.v), of.weight).sum();
  again.let_go();
  again.compute();
  torch::autograd::backward({z}, {}, /*retain_graph=*/true,
                            /*create_graph=*/false, {of.q});
  torch::autograd::backward({z}, {}, /*retain_graph=*/false,
                            /*create_graph=*/false, {of.k, of.weight});
  const Inputs plain = inputs(at::kFloat);
  linear_product(core(plain.q, plain.k, plain.v), plain.weight)
      .sum()
      .backward();
  EXPECT_TRUE(at::equal(of.q.grad(), plain.q.grad()));
  EXPECT_TRUE(at::equal(of.k.grad(), plain.k.grad()));
  EXPECT_TRUE(at::equal(of.weight.grad(), plain.weight.grad()));
}

TEST(CoreAgain, HasNoSecondDerivative) {
  const Inputs of = inputs(at::kFloat);
  CoreAgain again;
  const at::Tensor z = again.forward(core, of.q, of.k, of.v).sum();
  again.let_go();
  again.compute();
  EXPECT_THROW(torch::autograd::grad({z}, {of.q}, {}, /*retain_graph=*/true,
                                     /*create_graph=*/true),
               c10::Error);
}

TEST(CoreAgain, IsRefusedWhereNothingWasComputed) {
  const Inputs of = inputs(at::kFloat);
  CoreAgain again;
  const at::Tensor z = again.forward(core, of.q, of.k, of.v).sum();
  EXPECT_THROW(z.backward(), c10::Error);
}

}  // namespace
}  // namespace tessera::nn
