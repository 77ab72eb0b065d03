#include "tessera/nn/expert_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/nn/grouped_linear.h"

namespace tessera::nn {
namespace {

constexpr int64_t kTokens = 70, kChoices = 3, kWidth = 300, kExperts = 5;

struct Case {
  at::Tensor x, weights, experts;  // experts: (N, k); kExperts is none
  RowOrder order;
  int64_t rows;  // that go somewhere
};

// Those before `first` choose nothing.
Case make(int64_t first, bool drops) {
  at::manual_seed(3);
  Case of;
  of.x = at::randn({kTokens, kWidth}, at::kDouble).requires_grad_();
  of.weights = at::rand({kTokens, kChoices}, at::kDouble).requires_grad_();
  of.experts = at::randint(drops ? kExperts + 1 : kExperts, {kTokens, kChoices},
                           at::kLong);
  of.experts.narrow(0, 0, first).fill_(kExperts);
  of.order = order_of_rows(of.experts, (kTokens - first) * kChoices);
  of.rows = (of.experts < kExperts).sum().item<int64_t>();
  return of;
}

// Experts that multiply their rows by 1 + their number.
at::Tensor multiplied(const Case& of, const at::Tensor& rows) {
  const at::Tensor by =
      of.experts.flatten().index_select(0, of.order.choice).to(at::kDouble) + 1;
  return (rows * by.unsqueeze(1)).narrow(0, 0, of.rows);
}

at::Tensor by_formula(const Case& of) {
  const at::Tensor by =
      at::where(of.experts < kExperts, of.experts.to(at::kDouble) + 1, 0.0);
  return of.x * (of.weights * by).sum(1, /*keepdim=*/true);
}

void expect_close(const at::Tensor& found, const at::Tensor& wanted) {
  EXPECT_LT((found - wanted).abs().max().item<double>(), 1e-12);
}

TEST(ExpertRows, AreTheFormulaForwardAndBackward) {
  for (const int64_t first : {0, 17}) {
    for (const bool drops : {false, true}) {
      const Case of = make(first, drops);
      const at::Tensor y = tokens_of_rows(
          multiplied(of, rows_of_tokens(of.x, of.order)), of.weights, of.order);
      const at::Tensor wanted = by_formula(of);
      expect_close(y, wanted);
      const at::Tensor dy = at::randn_like(y);
      const auto found = torch::autograd::grad({y}, {of.x, of.weights}, {dy});
      const auto exact =
          torch::autograd::grad({wanted}, {of.x, of.weights}, {dy});
      expect_close(found[0], exact[0]);
      expect_close(found[1], exact[1]);
    }
  }
}

TEST(ExpertRows, OfOneExpertKeepTheOrderOfChoices) {
  const Case of = make(/*first=*/17, /*drops=*/true);
  const at::Tensor sorted =
      of.experts.flatten().index_select(0, of.order.choice);
  EXPECT_TRUE((sorted.diff() >= 0).all().item<bool>());
  const at::Tensor same = sorted.diff() == 0;
  EXPECT_TRUE((of.order.choice.diff() > 0)
                  .logical_or(same.logical_not())
                  .all()
                  .item<bool>());
  EXPECT_TRUE(
      at::equal(of.order.token, of.order.choice.floor_divide(kChoices)));
}

// Rows of bf16 are added up in fp32, with weights of fp32.
TEST(ExpertRows, OfBf16AreRoundedOnce) {
  Case of = make(/*first=*/0, /*drops=*/false);
  const at::Tensor x = of.x.detach().to(at::kBFloat16);
  const at::Tensor y =
      tokens_of_rows(rows_of_tokens(x, of.order),
                     of.weights.detach().to(at::kFloat), of.order);
  const at::Tensor wanted =
      x.to(at::kDouble) * of.weights.detach().sum(1, /*keepdim=*/true);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LT(
      ((y.to(at::kDouble) - wanted).abs() / wanted.abs()).max().item<double>(),
      0x1p-8);
}

TEST(ExpertRows, TheirProductsHaveNoSecondDerivatives) {
  const at::Tensor rows = at::randn({3, 4}, at::kDouble).requires_grad_();
  const at::Tensor weight = at::randn({3, 5, 4}, at::kDouble);
  const at::Tensor y = grouped_product(rows, weight, RowGroups({1, 0, 2}));
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {rows}, {},
                                     /*retain_graph=*/true,
                                     /*create_graph=*/true),
               Error);
}

TEST(ExpertRows, HaveSecondDerivatives) {
  const Case of = make(/*first=*/17, /*drops=*/true);
  const at::Tensor dy = at::randn({kTokens, kWidth}, at::kDouble);
  const auto second = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.pow(3)}, {of.x, of.weights},
                                             {dy}, /*retain_graph=*/true,
                                             /*create_graph=*/true);
    return torch::autograd::grad(
        {first[0].square().sum() + first[1].square().sum()},
        {of.x, of.weights});
  };
  const auto found = second(tokens_of_rows(
      multiplied(of, rows_of_tokens(of.x, of.order)), of.weights, of.order));
  const auto exact = second(by_formula(of));
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_LT((found[i] - exact[i]).norm().item<double>(),
              1e-12 * exact[i].norm().item<double>());
  }
}

}  // namespace
}  // namespace tessera::nn
