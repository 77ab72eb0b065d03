#include "tessera/nn/matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "tessera/core/error.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/wide_product.h"

namespace tessera::nn {
namespace {

double relative(const at::Tensor& found, const at::Tensor& wanted) {
  const at::Tensor wide = wanted.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

double bound_of(at::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 2e-6 : 1e-2;
}

class Matmul : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Matmul, ProductsOfEveryFormAreThoseOfDoublePrecision) {
  const at::ScalarType type = GetParam();
  for (const int64_t size : {1, 7, 96}) {
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
        if (type != at::kFloat) continue;
        for (const auto way : {ProductWay::kLibTorch, ProductWay::kOneDnn}) {
          if (way == ProductWay::kOneDnn && !has_one_dnn_products()) continue;
          product_into(y, left, right, /*adds=*/false, way);
          EXPECT_LT(relative(y, wanted), bound_of(type));
          product_into(y, left, right, /*adds=*/true, way);
          EXPECT_LT(relative(y, 2 * wanted), bound_of(type));
        }
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

// Over the edges of panels and blocks, by every set of vectors that runs here.
TEST(WideProduct, EveryShapeAndLayoutIsThatOfDoublePrecision) {
  struct Shape {
    int64_t rows, inner, columns;
  };
  const auto turned = [](const at::Tensor& t) {
    return t.t().contiguous().t();
  };
  for (const auto& [rows, inner, columns] :
       {Shape{1, 1, 1}, Shape{1, 300, 70}, Shape{13, 17, 31}, Shape{14, 16, 32},
        Shape{15, 257, 33}, Shape{230, 520, 97}, Shape{449, 256, 1030},
        Shape{3, 900, 1029}, Shape{300, 1100, 40}, Shape{40, 2100, 70}}) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor a = at::randn({rows, inner}).to(type);
      const at::Tensor b = at::randn({inner, columns}).to(type);
      const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
      for (const auto* table : detail::tables_that_run_here()) {
        SCOPED_TRACE(c10::str(table->name, " ", rows, " x ", inner, " x ",
                              columns, " ", type));
        at::Tensor first;
        for (const auto& left : {a, turned(a)}) {
          for (const auto& right : {b, turned(b)}) {
            const at::Tensor wide = at::full({rows, columns}, 7.0);
            detail::wide_product(*table, wide, left, right, /*adds=*/false);
            EXPECT_LT(relative(wide, exact), 1e-6);
            if (!first.defined()) first = wide;
            EXPECT_TRUE(wide.equal(first));  // however the memory lies
            const at::Tensor sums = at::full({rows, columns}, 2.0);
            detail::wide_product(*table, sums, left, right, /*adds=*/true);
            EXPECT_LT(relative(sums, exact + 2), 1e-6);
            if (type == at::kFloat) continue;
            const at::Tensor narrow = at::full({rows, columns}, 2.0).to(type);
            detail::wide_product(*table, narrow, left, right, /*adds=*/false);
            // Sums of deep products are taken in parts where y is fp32.
            if (inner > kernels::kProductInner) {
              EXPECT_LT(relative(narrow, exact), bound_of(type));
              detail::wide_product(*table, narrow, left, right, /*adds=*/true);
              EXPECT_LT(relative(narrow, 2 * exact), bound_of(type));
              continue;
            }
            EXPECT_TRUE(narrow.equal(wide.to(type)));
            detail::wide_product(*table, narrow, left, right, /*adds=*/true);
            const at::Tensor twice = wide.to(type).to(at::kFloat) + wide;
            EXPECT_TRUE(narrow.equal(twice.to(type)));
          }
        }
      }
    }
  }
}

// And writes nothing beside a part of y's rows.
TEST(WideProduct, ThreadsAndPartsChangeNoBit) {
  const at::Tensor a = at::randn({500, 300}).to(at::kBFloat16);
  const at::Tensor b = at::randn({300, 200}).to(at::kBFloat16);
  const int before = at::get_num_threads();
  const auto product = [&](int threads) {
    at::set_num_threads(threads);
    const at::Tensor whole = at::full({500, 210}, 3.0, at::kBFloat16);
    detail::wide_product(detail::table(), whole.narrow(1, 5, 200), a, b, false);
    at::set_num_threads(before);
    return whole;
  };
  const at::Tensor one = product(1);
  EXPECT_TRUE(product(2).equal(one));
  EXPECT_TRUE(product(3).equal(one));
  for (const int64_t beside : {0, 205}) {
    EXPECT_TRUE(one.narrow(1, beside, 5).eq(3).all().item<bool>());
  }
}

// Bits that are no number, and infinities, are those of the sums.
TEST(WideProduct, WhatIsNoNumberStays) {
  at::Tensor a = at::ones({40, 64}, at::kBFloat16);
  a[3][5] = std::numeric_limits<float>::infinity();
  a[4][6] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor b = at::ones({64, 40}, at::kBFloat16);
  const at::Tensor y = at::zeros({40, 40}, at::kBFloat16);
  detail::wide_product(detail::table(), y, a, b, /*adds=*/false);
  EXPECT_TRUE(at::isinf(y[3]).all().item<bool>());
  EXPECT_TRUE(at::isnan(y[4]).all().item<bool>());
  EXPECT_TRUE(y[5].eq(64).all().item<bool>());
}

TEST(MatmulWidened, OfNothingAddsNothing) {
  const at::Tensor a = at::empty({3, 0}), b = at::empty({0, 4});
  const at::Tensor y = at::full({3, 4}, 2.0);
  product_into(y, a, b, /*adds=*/true, ProductWay::kWidened);
  EXPECT_TRUE(y.eq(2).all().item<bool>());
  product_into(y, a, b, /*adds=*/false, ProductWay::kWidened);
  EXPECT_TRUE(y.eq(0).all().item<bool>());
}

TEST(MatmulWidened, RefusesWhatDoesNotFit) {
  const auto refuses = [](const at::Tensor& y, const at::Tensor& a,
                          const at::Tensor& b) {
    EXPECT_THROW(product_into(y, a, b, /*adds=*/false, ProductWay::kWidened),
                 Error);
  };
  const at::Tensor a = at::ones({3, 5}), b = at::ones({5, 4});
  const at::Tensor y = at::zeros({3, 4});
  refuses(y.to(at::kDouble), a.to(at::kDouble), b.to(at::kDouble));
  refuses(y, a, b.to(at::kHalf));
  refuses(y.to(at::kHalf), a, b);
  refuses(y, a, at::ones({6, 4}));
  refuses(at::zeros({3, 5}), a, b);
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
                         ::testing::Values(at::kDouble, at::kFloat,
                                           at::kBFloat16, at::kHalf),
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

// Of several products of one input, and no product is made for it.
TEST(MatmulInPlace, AnOutputThatNobodyUsesHasNoGradient) {
  const at::Tensor x = at::randn({4, 8}).requires_grad_();
  const at::Tensor used = at::randn({16, 8}).requires_grad_();
  const at::Tensor idle = at::randn({16, 8}).requires_grad_();
  linear_products(x, {used, idle}, {})[0].sum().backward();
  EXPECT_FALSE(idle.grad().defined());
  EXPECT_TRUE(
      at::allclose(used.grad(), x.detach().sum(0).expand({16, 8}), 1e-5, 1e-5));
  EXPECT_TRUE(
      at::allclose(x.grad(), used.detach().sum(0).expand({4, 8}), 1e-5, 1e-5));
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
