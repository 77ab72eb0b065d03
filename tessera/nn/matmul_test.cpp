#include "tessera/nn/matmul.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace tessera::nn {
namespace {

double relative(const at::Tensor& found, const at::Tensor& wanted) {
  const at::Tensor wide = wanted.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

double bound_of(at::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 2e-6 : 1e-2;
}

class Matmul : public testing::TestWithParam<at::ScalarType> {};

TEST_P(Matmul, ProductsOfEveryFormAreThoseOfDoublePrecision) {
  const at::ScalarType type = GetParam();
  for (const int64_t size : {1, 7, 96}) {  // the last through oneDNN
    const at::Tensor a = at::randn({size, size + 5}).to(type);
    const at::Tensor b = at::randn({size + 5, size + 3}).to(type);
    const at::Tensor wanted = a.to(at::kDouble).mm(b.to(at::kDouble));
    const auto turned = [](const at::Tensor& t) {
      return t.t().contiguous().t();
    };
    for (const auto& left : {a, turned(a)}) {
      for (const auto& right : {b, turned(b)}) {
        const at::Tensor y = at::full({size, size + 3}, 2.0).to(type);
        product_into(y, left, right);
        EXPECT_LT(relative(y, wanted), bound_of(type));
        product_into(y, left, right, /*adds=*/true);
        EXPECT_LT(relative(y, 2 * wanted), bound_of(type));
      }
    }
  }
}

// As on a processor that does not multiply bf16, and fp16 always: rounded once,
// at the end.
TEST(MatmulWidened, RoundsOnce) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::randn({600, 40}).to(type);
    const at::Tensor b = at::randn({40, 30}).to(type);
    const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
    const at::Tensor narrow = at::ones({600, 30}, type);
    const at::Tensor wide = at::ones({600, 30});
    product_into(wide, a, b, /*adds=*/false, ProductWay::kWidened);
    product_into(narrow, a, b, /*adds=*/false, ProductWay::kWidened);
    EXPECT_LT(relative(wide, exact), 1e-6);
    EXPECT_TRUE(narrow.equal(wide.to(type)));
    product_into(wide, a.t().contiguous().t(), b, /*adds=*/true,
                 ProductWay::kWidened);
    EXPECT_LT(relative(wide, 2 * exact), 1e-6);
  }
}

// Sums beyond fp16's range are infinite, not wrapped or cut.
TEST(MatmulWidened, OverflowIsInfinite) {
  const at::Tensor a = at::full({100, 100}, 60.0, at::kHalf);
  const at::Tensor y = at::zeros({100, 100}, at::kHalf);
  product_into(y, a, a);
  EXPECT_TRUE(at::isinf(y).all().item<bool>());
}

// Gradients may be kept in a type below that of the weights.
TEST(Matmul, GradientsBelowTheWeightsType) {
  for (const auto kept : {at::kBFloat16, at::kHalf}) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor weight = at::randn({96, 64}).to(type).requires_grad_();
      const at::Tensor table = at::randn({20, 64}).to(type).requires_grad_();
      weight.mutable_grad() = at::zeros({96, 64}, kept);
      table.mutable_grad() = at::zeros({20, 64}, kept);
      const at::Tensor ids = at::randint(20, {70}, at::kLong);
      const at::Tensor dy = at::randn({70, 96}).to(type);
      linear_product(table_rows(table, ids), weight).backward(dy);
      const auto wide = [](const at::Tensor& t) {
        return t.detach().to(at::kDouble).requires_grad_();
      };
      const at::Tensor weight2 = wide(weight), table2 = wide(table);
      at::linear(at::embedding(table2, ids), weight2)
          .backward(dy.to(at::kDouble));
      EXPECT_LT(relative(weight.grad(), weight2.grad()), 1e-2);
      EXPECT_LT(relative(table.grad(), table2.grad()), 1e-2);
      EXPECT_EQ(weight.grad().scalar_type(), kept);
    }
  }
}

// Three batches, the first into a .grad that is not there yet.
TEST_P(Matmul, GradientsAddUpAsThoseOfLibTorch) {
  const at::ScalarType type = GetParam();
  const auto parameter = [&](const std::vector<int64_t>& shape) {
    return at::randn(shape).to(type).requires_grad_();
  };
  const at::Tensor x = parameter({3, 40, 64});
  const at::Tensor weight = parameter({96, 64}), bias = parameter({96});
  const auto wide = [](const at::Tensor& t) {
    return t.detach().to(at::kDouble).requires_grad_();
  };
  const at::Tensor x2 = wide(x), weight2 = wide(weight), bias2 = wide(bias);
  for (int pass = 0; pass < 3; ++pass) {
    const at::Tensor dy = at::randn({3, 40, 96}).to(type);
    linear_product(x, weight, bias).backward(dy);
    at::linear(x2, weight2, bias2).backward(dy.to(at::kDouble));
  }
  EXPECT_LT(relative(x.grad(), x2.grad()), bound_of(type));
  EXPECT_LT(relative(weight.grad(), weight2.grad()), bound_of(type));
  EXPECT_LT(relative(bias.grad(), bias2.grad()), bound_of(type));
}

TEST_P(Matmul, RowsOfATableAddUpAsThoseOfLibTorch) {
  const at::ScalarType type = GetParam();
  const at::Tensor table = at::randn({20, 48}).to(type).requires_grad_();
  const at::Tensor other = table.detach().to(at::kDouble).requires_grad_();
  for (int pass = 0; pass < 2; ++pass) {
    const at::Tensor ids = at::randint(20, {4, 9}, at::kLong);
    const at::Tensor dy = at::randn({4, 9, 48}).to(type);
    table_rows(table, ids).backward(dy);
    at::embedding(other, ids).backward(dy.to(at::kDouble));
  }
  EXPECT_LT(relative(table.grad(), other.grad()), bound_of(type));
}

INSTANTIATE_TEST_SUITE_P(Types, Matmul,
                         testing::Values(at::kDouble, at::kFloat, at::kBFloat16,
                                         at::kHalf),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param));
                         });

at::Tensor weight_with_gradient() {
  at::Tensor weight = at::randn({16, 8}).requires_grad_();
  weight.mutable_grad() = at::ones({16, 8});
  return weight;
}

// The memory of .grad stays, and its values are the sum.
TEST(MatmulInPlace, GradientIsAddedWhereItLies) {
  const at::Tensor weight = weight_with_gradient(), x = at::randn({4, 8});
  const void* const memory = weight.grad().const_data_ptr();
  linear_product(x, weight).sum().backward();
  EXPECT_EQ(weight.grad().const_data_ptr(), memory);
  const at::Tensor wanted = x.sum(0).expand({16, 8}) + 1;
  EXPECT_TRUE(at::allclose(weight.grad(), wanted));
}

TEST(MatmulInPlace, WhoAsksForTheGradientGetsIt) {
  const at::Tensor weight = weight_with_gradient(), x = at::randn({4, 8});
  const at::Tensor gradient =
      torch::autograd::grad({linear_product(x, weight).sum()}, {weight})[0];
  EXPECT_TRUE(at::allclose(gradient, x.sum(0).expand({16, 8})));
  EXPECT_TRUE(weight.grad().equal(at::ones({16, 8})));
}

TEST(MatmulInPlace, AHookHearsOfTheGradient) {
  const at::Tensor weight = weight_with_gradient(), x = at::randn({4, 8});
  int heard = 0;
  weight.register_hook(
      [&](const at::Tensor& gradient) { heard += gradient.defined() ? 1 : 0; });
  linear_product(x, weight).sum().backward();
  EXPECT_EQ(heard, 1);
  EXPECT_TRUE(at::allclose(weight.grad(), x.sum(0).expand({16, 8}) + 1));
}

// d/dx of the norm of d loss / dx: a backward that is itself recorded.
TEST(MatmulInPlace, ARecordedBackwardIsFollowed) {
  const auto second = [](const auto& product) {
    at::manual_seed(3);
    const auto wide = at::TensorOptions().dtype(at::kDouble);
    at::Tensor weight = at::randn({6, 5}, wide).requires_grad_();
    const at::Tensor x = at::randn({4, 5}, wide).requires_grad_();
    const at::Tensor dx = torch::autograd::grad(
        {product(x, weight).tanh().sum()}, {x}, {}, /*retain_graph=*/true,
        /*create_graph=*/true)[0];
    return torch::autograd::grad({dx.square().sum()}, {weight})[0];
  };
  const auto ours = [](const at::Tensor& x, const at::Tensor& weight) {
    return linear_product(x, weight);
  };
  const auto theirs = [](const at::Tensor& x, const at::Tensor& weight) {
    return at::linear(x, weight);
  };
  EXPECT_LT(relative(second(ours), second(theirs)), 1e-13);
}

}  // namespace
}  // namespace tessera::nn
