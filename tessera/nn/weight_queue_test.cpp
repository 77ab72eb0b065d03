#include "tessera/nn/weight_queue.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tessera/nn/blocks.h"
#include "tessera/nn/detail/remade.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/moe.h"

namespace tessera::nn {
namespace {

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  return at::randn(sizes, type).requires_grad_();
}

// A function of x and parameters; both parts of its backward beside the whole.
using Layer = std::function<at::Tensor(const at::Tensor& x,
                                       const std::vector<at::Tensor>& of)>;

// The gradients of x and of the parameters, which are there already.
std::vector<at::Tensor> gradients_of(const Layer& layer, const at::Tensor& x,
                                     const std::vector<at::Tensor>& parameters,
                                     bool in_parts, bool from_nothing) {
  const at::Tensor input = x.detach().requires_grad_();
  for (const auto& each : parameters) {
    each.mutable_grad() =
        from_nothing ? at::Tensor() : at::full_like(each, 0.5).detach();
  }
  const auto queue = c10::make_intrusive<WeightQueue>();
  at::Tensor y;
  {
    const WeightQueue::Scope scope(queue);
    y = layer(input, parameters);
  }
  const at::Tensor dy = at::arange(y.numel(), y.options().requires_grad(false))
                            .view(y.sizes())
                            .sin();
  if (in_parts) {
    input.mutable_grad() = queue->put_off({y}, {dy}, input, parameters);
    y = at::Tensor();
    for (const auto& each : parameters) {
      if (!from_nothing) {
        EXPECT_TRUE(at::equal(each.grad(), at::full_like(each, 0.5)));
      } else {
        EXPECT_FALSE(each.grad().defined());
      }
    }
    queue->run();
    queue->run();  // adds nothing more
  } else {
    torch::autograd::backward({y}, {dy});
  }
  std::vector<at::Tensor> found = {input.grad()};
  for (const auto& each : parameters) found.push_back(each.grad().clone());
  return found;
}

void expect_same(const Layer& layer, const at::Tensor& x,
                 const std::vector<at::Tensor>& parameters) {
  for (const bool from_nothing : {false, true}) {
    const auto whole =
        gradients_of(layer, x, parameters, /*in_parts=*/false, from_nothing);
    const auto parts =
        gradients_of(layer, x, parameters, /*in_parts=*/true, from_nothing);
    for (size_t i = 0; i < whole.size(); ++i) {
      // Where nothing was there the engine adds up what comes twice by itself.
      const bool same = from_nothing
                            ? at::allclose(whole[i], parts[i], 1e-13, 1e-13)
                            : at::equal(whole[i], parts[i]);
      EXPECT_TRUE(same) << "gradient " << i;
    }
  }
}

TEST(WeightQueue, ProductsAndBiases) {
  const at::Tensor x = at::randn({2, 5, 3}, at::kDouble);
  expect_same(
      [](const at::Tensor& in, const std::vector<at::Tensor>& of) {
        const auto both = linear_products(in, {of[0], of[1]}, {of[2], of[3]});
        return linear_product(both[0] * both[1].sigmoid(), of[4]);
      },
      x, {leaf({4, 3}), leaf({4, 3}), leaf({4}), leaf({4}), leaf({2, 4})});
}

TEST(WeightQueue, AWeightUsedTwiceIsAddedToTwice) {
  const at::Tensor x = at::randn({6, 4}, at::kDouble);
  expect_same(
      [](const at::Tensor& in, const std::vector<at::Tensor>& of) {
        return linear_product(linear_product(in, of[0]).tanh(), of[0]);
      },
      x, {leaf({4, 4})});
}

TEST(WeightQueue, InputsThatAreMadeAgain) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::randn({2, 6, 8}, type);
    expect_same(
        [](const at::Tensor& in, const std::vector<at::Tensor>& of) {
          const at::Tensor normed = detail::RmsNorm::apply(in, of[0], 1e-6);
          const auto both = linear_products(normed, {of[1], of[2]}, {});
          const at::Tensor y = activated(MlpKind::kSwiGlu, both[0], both[1]);
          return in + linear_product(y, of[3]);
        },
        x,
        {leaf({8}, type), leaf({10, 8}, type), leaf({10, 8}, type),
         leaf({8, 10}, type)});
  }
}

TEST(WeightQueue, Experts) {
  const at::Tensor x = at::randn({7, 4}, at::kDouble);
  torch::nn::Module root;
  const auto made = std::make_shared<Experts>(
      3, MlpOptions{.kind = MlpKind::kSwiGlu, .width = 4, .hidden = 5});
  const Experts& experts = *root.register_module("experts", made);
  materialise(root, {.seed = 7, .dtype = at::kDouble});
  expect_same(
      [&](const at::Tensor& in, const std::vector<at::Tensor>&) {
        return experts.forward(in.sin(), RowGroups({2, 0, 5})).cos();
      },
      x,
      {experts.gate()->weight(), experts.up()->weight(),
       experts.down()->weight()});
}

// Of what no function of ours multiplies the gradient is made at once, and
// added later; what is frozen has none.
TEST(WeightQueue, OtherParametersAndFrozenOnes) {
  const at::Tensor x = at::randn({6, 4}, at::kDouble);
  const at::Tensor frozen = at::randn({4, 4}, at::kDouble);
  expect_same(
      [&](const at::Tensor& in, const std::vector<at::Tensor>& of) {
        return linear_product(at::mm(in, of[0]), frozen) * of[1];
      },
      x, {leaf({4, 4}), leaf({4})});
  EXPECT_FALSE(frozen.grad().defined());
}

TEST(WeightQueue, IsClosedBehindABackwardThatFails) {
  const at::Tensor w = leaf({3, 3}), x = leaf({2, 3});
  const auto queue = c10::make_intrusive<WeightQueue>();
  at::Tensor y;
  {
    const WeightQueue::Scope scope(queue);
    y = linear_product(x, w);
  }
  const at::Tensor of_another = at::ones({5, 7}, at::kDouble);
  EXPECT_ANY_THROW(queue->put_off({y}, {of_another}, x, {w}));
  torch::autograd::backward({y}, {at::ones_like(y)});
  EXPECT_TRUE(w.grad().defined());
}

TEST(WeightQueue, ABackwardOutsideOfItMultipliesAtOnce) {
  const at::Tensor w = leaf({3, 3}), x = at::randn({2, 3}, at::kDouble);
  const auto queue = c10::make_intrusive<WeightQueue>();
  at::Tensor y;
  {
    const WeightQueue::Scope scope(queue);
    y = linear_product(x, w);
  }
  torch::autograd::backward({y}, {at::ones_like(y)});
  ASSERT_TRUE(w.grad().defined());
  queue->run();
  EXPECT_TRUE(at::allclose(w.grad(), at::ones({2, 3}, at::kDouble).t().mm(x)));
}

}  // namespace
}  // namespace tessera::nn
