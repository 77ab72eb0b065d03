#include "tessera/nn/loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tests/support/gradients.h"

namespace tessera::nn {
namespace {

TEST(CrossEntropy, SumWeightAndGradientAreThoseOfTheFormula) {
  // Wide enough that rows go in several chunks.
  const auto logits = at::randn({37, 20011}, kWide).requires_grad_();
  auto targets = at::randint(20011, {37}, at::kLong);
  targets[3] = kIgnoreIndex;
  targets[36] = kIgnoreIndex;
  const auto expected = at::cross_entropy_loss(
      logits, targets, {}, at::Reduction::Sum, kIgnoreIndex);
  const auto loss = cross_entropy(logits.clone(), targets);
  EXPECT_EQ(loss.weight.item<double>(), 35.0);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-9);
  const auto ours = torch::autograd::grad({loss.sum * 0.25}, {logits})[0];
  const auto theirs = torch::autograd::grad({expected * 0.25}, {logits})[0];
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-12, 1e-15));
}

TEST(CrossEntropy, AScaleMakesTheGradientAtOnce) {
  const auto logits = at::randn({9, 40}, kWide).requires_grad_();
  const auto targets = at::randint(40, {9}, at::kLong);
  const auto expected =
      at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  const auto wanted = torch::autograd::grad({expected * 0.25}, {logits})[0];
  const auto overwritten = logits.detach().clone();
  const auto loss = cross_entropy(overwritten, targets, nullptr, 0.25);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-12);
  EXPECT_TRUE(at::allclose(overwritten, wanted, 1e-12, 1e-15));
  EXPECT_GT(overwritten._version(), 0);
}

// The gradient would go into a copy.
TEST(CrossEntropy, AScaleIsOfLogitsThatAreRows) {
  const auto logits = at::randn({2, 3, 5}, kWide).transpose(0, 1);
  const auto targets = at::randint(5, {3, 2}, at::kLong);
  EXPECT_THROW(cross_entropy(logits, targets, nullptr, 1.0), tessera::Error);
  EXPECT_NEAR(cross_entropy(logits, targets).sum.item<double>(),
              cross_entropy(logits.contiguous(), targets).sum.item<double>(),
              1e-12);
}

TEST(CrossEntropy, WhoKeptTheLogitsIsTold) {
  const auto logits = input({2, 5}).tanh();
  const auto loss = cross_entropy(logits, at::tensor({1, 2}, at::kLong));
  EXPECT_THROW(loss.sum.backward(), c10::Error);
}

TEST(CrossEntropy, HasNoSecondDerivative) {
  const auto logits = input({2, 5});
  const auto loss =
      cross_entropy(logits.clone(), at::tensor({1, 2}, at::kLong));
  EXPECT_THROW(torch::autograd::grad({loss.sum}, {logits}, {},
                                     /*retain_graph=*/true,
                                     /*create_graph=*/true),
               tessera::Error);
}

TEST(CrossEntropy, LeavesLogitsAloneWithoutGradients) {
  const auto logits = at::randn({4, 7});
  const auto before = logits.clone();
  const auto targets = at::tensor({1, 2, 3, 4}, at::kLong);
  const auto loss = cross_entropy(logits, targets);
  EXPECT_TRUE(at::equal(logits, before));
  EXPECT_NEAR(loss.sum.item<double>(),
              at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum)
                  .item<double>(),
              1e-5);
}

TEST(CrossEntropy, LogitsOfLowPrecisionAreSummedInFloat) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto logits = at::randn({64, 1000}).to(type);
    const auto targets = at::randint(1000, {64}, at::kLong);
    const auto expected = at::cross_entropy_loss(
        logits.to(at::kDouble), targets, {}, at::Reduction::Sum);
    EXPECT_NEAR(cross_entropy(logits, targets).sum.item<double>(),
                expected.item<double>(), 1e-5 * expected.item<double>());
  }
}

TEST(CrossEntropy, NoTargetAtAllIsZero) {
  const auto logits = at::randn({2, 3, 5}, kWide).requires_grad_();
  const auto loss =
      cross_entropy(logits.clone(), at::full({2, 3}, kIgnoreIndex, at::kLong));
  EXPECT_EQ(loss.sum.item<double>(), 0.0);
  EXPECT_EQ(loss.weight.item<double>(), 0.0);
  EXPECT_EQ(
      torch::autograd::grad({loss.sum}, {logits})[0].abs().sum().item<double>(),
      0.0);
}

TEST(CrossEntropy, RefusesWhatDoesNotFit) {
  const auto logits = at::randn({2, 5});
  EXPECT_THROW(cross_entropy(logits, at::tensor({1, 2, 3}, at::kLong)),
               tessera::Error);
  EXPECT_ANY_THROW(cross_entropy(logits, at::tensor({1, 5}, at::kLong)));
  EXPECT_ANY_THROW(cross_entropy(logits, at::tensor({1, -1}, at::kLong)));
  EXPECT_THROW(cross_entropy(logits, at::tensor({1, 2}, at::kInt)),
               tessera::Error);
}

TEST(CrossEntropy, ASecondBackwardIsRefused) {
  const auto logits = at::randn({2, 5}).requires_grad_();
  const auto loss =
      cross_entropy(logits.clone(), at::tensor({1, 2}, at::kLong));
  torch::autograd::backward({loss.sum}, {}, /*retain_graph=*/true);
  EXPECT_THROW(torch::autograd::backward({loss.sum}), tessera::Error);
}

TEST(HeadLoss, RefusesWhatDoesNotFit) {
  const Head head{.weight = at::randn({5, 4}, kWide), .columns = 5};
  const auto targets = at::randint(5, {6}, at::kLong);
  const auto of = [&](at::IntArrayRef hidden) {
    return head_loss(head, at::randn(hidden, kWide), targets, 1.0);
  };
  of({6, 4});
  EXPECT_THROW(of({7, 4}), tessera::Error);
  EXPECT_THROW(of({3, 8}), tessera::Error);
}

// Rows enough for several lots, of which the last is shorter.
TEST(HeadLoss, InLotsIsThatOfWholeLogits) {
  const int64_t rows = 1201, width = 3, entries = 8209;
  ASSERT_LT(head_rows(rows, entries), rows);
  const auto hidden = at::randn({rows, width}, kWide).requires_grad_();
  const auto weight = at::randn({entries, width}, kWide).requires_grad_();
  auto targets = at::randint(entries, {rows}, at::kLong);
  targets[700] = kIgnoreIndex;
  const auto expected =
      at::cross_entropy_loss(at::mm(hidden, weight.t()), targets, {},
                             at::Reduction::Sum, kIgnoreIndex);
  const auto wanted =
      torch::autograd::grad({expected * 0.25}, {hidden, weight});
  const Head head{.weight = weight, .columns = entries};
  {
    const at::NoGradGuard no_grad;
    const auto alone = head_loss(head, hidden, targets);
    EXPECT_NEAR(alone.sum.item<double>(), expected.item<double>(), 1e-9);
  }
  const auto recorded = head_loss(head, hidden, targets);
  const auto asked =
      torch::autograd::grad({recorded.sum * 0.25}, {hidden, weight});
  for (const double times : {1.0, 2.0}) {  // the gradient is added to
    const auto overwritten = hidden.detach().clone();
    const auto loss = head_loss(head, overwritten, targets, 0.25);
    EXPECT_EQ(loss.weight.item<double>(), 1200.0);
    EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-9);
    EXPECT_TRUE(at::allclose(overwritten, wanted[0], 1e-11, 1e-13));
    EXPECT_TRUE(at::allclose(weight.grad(), wanted[1] * times, 1e-11, 1e-13));
  }
  EXPECT_TRUE(at::allclose(asked[0], wanted[0], 1e-11, 1e-13));
  EXPECT_TRUE(at::allclose(asked[1], wanted[1], 1e-11, 1e-13));
}

TEST(HeadLoss, AFrozenHeadHasNoGradient) {
  const auto hidden = at::randn({6, 4}, kWide);
  const auto weight = at::randn({5, 4}, kWide);
  const auto targets = at::randint(5, {6}, at::kLong);
  const auto leaf = hidden.clone().requires_grad_();
  at::cross_entropy_loss(at::mm(leaf, weight.t()), targets, {},
                         at::Reduction::Sum)
      .backward();
  head_loss({.weight = weight, .columns = 5}, hidden, targets, 1.0);
  EXPECT_TRUE(at::allclose(hidden, leaf.grad(), 1e-12));
  EXPECT_FALSE(weight.grad().defined());
}

// Lots depend on what all ranks know alike, and cover all rows.
TEST(HeadLoss, LotsAreEven) {
  EXPECT_EQ(head_rows(2048, 8192), 512);
  EXPECT_EQ(head_rows(1201, 8209), 401);
  EXPECT_EQ(head_rows(600, 200'000), 300);
  EXPECT_EQ(head_rows(512, 200'000), 512);
  EXPECT_EQ(head_rows(5000, 100), 5000);
  EXPECT_EQ(head_rows(0, 100), 1);
  EXPECT_EQ(head_rows(65536, 50257, /*on_cpu=*/false), 5042);
}

}  // namespace
}  // namespace tessera::nn
