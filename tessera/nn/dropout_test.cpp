#include "tessera/nn/dropout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/mask.h"
#include "tests/support/masks.h"

namespace tessera::nn {
namespace {

using masks::mask_of;

Dropout dropout_of(double rate, const Draw& draw = {7, 3, 5},
                   const std::string& name = "blocks.1.mlp") {
  return dropout_named(name, rate, draw);
}

// What add_kept() leaves of ones.
at::Tensor kept(const Dropout& dropout, const at::IntArrayRef shape,
                at::ScalarType type = at::kDouble) {
  return add_kept({}, at::ones(shape, type), dropout, {{0, shape[1]}});
}

TEST(Dropout, MasksAreThoseOfTheHeader) {
  const Dropout dropout = dropout_of(0.3);
  // Two pieces of a longer sequence, of odd lengths.
  const Positions positions = {{5, 7}, {40, 6}};
  for (const int64_t width : {1, 16, 63, 64, 65, 200}) {
    const at::Tensor wanted = mask_of(dropout, 3, positions, width);
    for (const auto type :
         {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor found =
          add_kept({}, at::ones({3, 13, width}, type), dropout, positions);
      EXPECT_EQ(found.scalar_type(), type);
      EXPECT_TRUE(at::equal(found, wanted.to(type))) << width << type;
    }
  }
}

TEST(Dropout, EverySetOfVectorsHasTheSameMasks) {
  const Dropout dropout = dropout_of(0.1);
  constexpr int64_t kWidth = 150, kRow = 9;
  const at::Tensor wanted = mask_of(dropout, 1, {{kRow, 1}}, kWidth).flatten();
  for (const auto* each : detail::tables_that_run_here()) {
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const at::Tensor x = at::ones({kWidth}, type);
      each->drop(detail::element_of(x), detail::mask_of(dropout, 0, 0), kRow,
                 nullptr, x.data_ptr(), x.data_ptr(), kWidth);
      EXPECT_TRUE(at::equal(x, wanted.to(type))) << each->name << type;
    }
  }
}

TEST(Dropout, AddsWhatIsKeptAndGoesBack) {
  const Dropout dropout = dropout_of(0.25);
  const Positions positions = {{3, 4}};
  const at::Tensor mask = mask_of(dropout, 2, positions, 70);
  const auto normal = [] { return at::randn({2, 4, 70}, at::kDouble); };
  const at::Tensor past = normal().requires_grad_();
  const at::Tensor x = normal().requires_grad_();
  const at::Tensor gradient = normal();
  const at::Tensor made = x * 1.0;
  const at::Tensor y = add_kept(past, made, dropout, positions);
  EXPECT_EQ(y.data_ptr(), made.data_ptr());
  EXPECT_TRUE(at::allclose(y, past + x * mask, 1e-15, 1e-15));
  torch::autograd::backward({y}, {gradient});
  EXPECT_TRUE(at::equal(past.grad(), gradient));
  EXPECT_TRUE(at::equal(x.grad(), gradient * mask));
}

TEST(Dropout, LeavesViewsAndLetsPartsOfAGraphBeWithout) {
  const Dropout dropout = dropout_of(0.5);
  const at::Tensor whole = at::randn({2, 3, 8}, at::kDouble);
  const at::Tensor before = whole.clone();
  const at::Tensor y = add_kept({}, whole.view({2, 3, 8}), dropout, {{0, 3}});
  EXPECT_TRUE(at::equal(whole, before));
  EXPECT_FALSE(y.requires_grad());
  const at::Tensor past = at::randn({2, 3, 8}, at::kDouble).requires_grad_();
  torch::autograd::backward(
      {add_kept(past, whole.clone(), dropout, {{0, 3}}).sum()});
  EXPECT_TRUE(at::equal(past.grad(), at::ones_like(past)));
}

TEST(Dropout, HasNoSecondDerivative) {
  const at::Tensor x = at::randn({1, 2, 8}, at::kDouble).requires_grad_();
  const at::Tensor y = add_kept({}, x * 1.0, dropout_of(0.5), {{0, 2}});
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                     /*create_graph=*/true),
               Error);
}

TEST(Dropout, KeepsSomething) {
  for (const double rate : {1.0, 1.5}) {
    EXPECT_THROW(kept(dropout_of(rate), {1, 2, 3}), Error);
  }
}

// Standard deviations from the mean, of shares that are kept of n.
double deviation(double kept, double rate, int64_t n) {
  const auto count = static_cast<double>(n);
  return (kept - (1 - rate)) / std::sqrt(rate * (1 - rate) / count);
}

TEST(Dropout, KeepsItsShare) {
  constexpr int64_t kCount = int64_t{8} * 128 * 512;
  for (const double rate : {0.01, 0.1, 0.5, 0.9, 0.99}) {
    const at::Tensor mask = kept(dropout_of(rate), {8, 128, 512});
    const double share = mask.ne(0).to(at::kDouble).mean().item<double>();
    EXPECT_LT(std::abs(deviation(share, rate, kCount)), 4) << rate;
    EXPECT_NEAR(mask.max().item<double>(), 1 / (1 - rate), 1e-12);
    // Also of each column, each token and each sample alone.
    for (const int64_t dim : {0, 1, 2}) {
      const at::Tensor shares =
          mask.ne(0).to(at::kDouble).transpose(0, dim).flatten(1).mean(1);
      const int64_t of_one = kCount / shares.numel();
      const double worst = deviation(
          (shares - (1 - rate)).abs().max().item<double>() + (1 - rate), rate,
          of_one);
      EXPECT_LT(worst, 6) << rate << " along " << dim;
    }
  }
}

// Correlation of two masks, in standard deviations of what chance gives.
double correlation(const at::Tensor& a, const at::Tensor& b) {
  const auto centred = [](const at::Tensor& x) {
    return x.flatten() - x.mean();
  };
  const at::Tensor x = centred(a), y = centred(b);
  const double r = (x.dot(y) / (x.norm() * y.norm())).item<double>();
  return std::abs(r) * std::sqrt(static_cast<double>(x.numel()));
}

TEST(Dropout, MasksAreIndependent) {
  constexpr double kRate = 0.3;
  const std::vector<int64_t> shape = {4, 64, 256};
  const at::Tensor mask = kept(dropout_of(kRate), shape);
  const auto other = [&](const Draw& draw, const char* name = "blocks.1.mlp") {
    return kept(dropout_of(kRate, draw, name), shape);
  };
  EXPECT_TRUE(at::equal(mask, other({7, 3, 5})));
  EXPECT_LT(correlation(mask, other({8, 3, 5})), 4);  // of another seed
  EXPECT_LT(correlation(mask, other({7, 4, 5})), 4);  // step
  EXPECT_LT(correlation(mask, other({7, 3, 9})), 4);  // samples
  EXPECT_LT(correlation(mask, other({7, 3, 5}, "blocks.2.mlp")), 4);
  EXPECT_LT(correlation(mask, other({7, 3, 5}, "blocks.1.attention")), 4);
  for (const int64_t dim : {0, 1, 2}) {  // neighbours
    const int64_t count = mask.size(dim) - 1;
    EXPECT_LT(
        correlation(mask.narrow(dim, 0, count), mask.narrow(dim, 1, count)), 4)
        << dim;
  }
  // Words of one counter, and counters that lie side by side.
  for (const int64_t apart : {16, 64, 128}) {
    const int64_t count = mask.size(2) - apart;
    EXPECT_LT(
        correlation(mask.narrow(2, 0, count), mask.narrow(2, apart, count)), 4)
        << apart;
  }
  // The next samples of a step are those of the next micro-batch.
  EXPECT_TRUE(
      at::equal(mask.narrow(0, 2, 2), other({7, 3, 7}).narrow(0, 0, 2)));
}

}  // namespace
}  // namespace tessera::nn
