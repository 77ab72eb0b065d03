#include "tessera/nn/moe.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/communicator.h"

namespace tessera::nn {
namespace {

constexpr int64_t kWidth = 6, kExperts = 4;

std::shared_ptr<Moe> make(int64_t top_k) {
  auto moe = std::make_shared<Moe>(
      MoeOptions{kExperts, top_k, {.width = kWidth, .hidden = 5}});
  materialise(*moe, {.seed = 7, .dtype = at::kDouble});
  return moe;
}

at::Tensor sample(int64_t batch, int64_t tokens) {
  at::manual_seed(1);
  return at::randn({batch, tokens, kWidth}, at::kDouble).requires_grad_();
}

// Token by token, as the formula has it.
at::Tensor by_formula(const Moe& moe, const at::Tensor& x, int64_t top_k) {
  const at::Tensor tokens = x.reshape({-1, kWidth});
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < tokens.size(0); ++t) {
    const at::Tensor token = tokens.narrow(0, t, 1);
    const at::Tensor p = at::softmax(moe.gate()->forward(token), -1)[0];
    const auto [best, picked] = at::topk(p, top_k);
    at::Tensor y = at::zeros({1, kWidth}, at::kDouble);
    for (int64_t i = 0; i < top_k; ++i) {
      const auto& expert = moe.experts()[picked[i].item<int64_t>()];
      y = y + best[i] / best.sum() * expert->forward(token);
    }
    rows.push_back(y);
  }
  return at::cat(rows).view(x.sizes());
}

void expect_close(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-14);
}

TEST(Moe, IsItsFormulaForwardAndBackward) {
  for (int64_t top_k : {1, 2, 4}) {
    const auto moe = make(top_k);
    const at::Tensor x = sample(2, 5), weight = at::rand_like(x).detach();
    (moe->forward(x) * weight).sum().backward();
    std::vector<at::Tensor> mine = {x.grad().clone()};
    for (auto& each : moe->parameters()) mine.push_back(each.grad().clone());
    x.mutable_grad() = at::Tensor();
    moe->zero_grad();

    const at::Tensor y = by_formula(*moe, x, top_k);
    expect_close(moe->forward(x), y);
    (y * weight).sum().backward();
    expect_close(mine[0], x.grad());
    size_t next = 1;
    for (auto& each : moe->parameters()) {
      // An expert without a token: zero here, none by the formula.
      const at::Tensor theirs =
          each.grad().defined() ? each.grad() : at::zeros_like(each);
      expect_close(mine[next++], theirs);
    }
  }
}

// k where the load is even; E where one expert has it all (k 1).
TEST(Moe, BalanceOfEvenAndOneSidedLoads) {
  const at::NoGradGuard no_grad;
  for (const auto& [scale, loss] : {std::pair{0.0, 1.0}, {1e3, 4.0}}) {
    const auto moe = make(/*top_k=*/1);
    moe->gate()->weight().zero_();
    moe->gate()->weight()[2].fill_(scale);
    Balance balance;
    moe->forward(at::ones({3, 8, kWidth}, at::kDouble), &balance);
    moe->forward(at::ones({1, 8, kWidth}, at::kDouble), &balance);
    EXPECT_NEAR(balance.loss.item<double>(), 4 * loss, 1e-12);
    EXPECT_EQ(balance.load.sum().item<double>(), 32);
    if (scale > 0) {
      EXPECT_EQ(balance.load[2].item<double>(), 32);
    }
  }
}

// One rank's tokens all go to the other's experts, and none come back to it.
TEST(Moe, ARankWithoutAToken) {
  const auto whole = make(/*top_k=*/1);
  const at::Tensor x = sample(1, 4).detach().abs();
  {
    const at::NoGradGuard no_grad;
    whole->gate()->weight().zero_();
    whole->gate()->weight()[3].fill_(10);
  }
  const at::Tensor y = whole->forward(x);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const auto moe = make(/*top_k=*/1);
    {
      const at::NoGradGuard no_grad;
      moe->gate()->weight().copy_(whole->gate()->weight());
    }
    moe->set_shard({.exchange = &ranks.world(), .region = {}});
    const at::Tensor mine = x.clone().requires_grad_();
    const at::Tensor z = moe->forward(mine);
    expect_close(z, y);
    z.sum().backward();
    // Both ranks' tokens went to expert 3, which rank 1 has.
    for (int64_t e = 0; e < kExperts; ++e) {
      const at::Tensor grad = moe->experts()[e]->up()->weight().grad();
      const bool here = e / 2 == ranks.rank();
      ASSERT_EQ(grad.defined(), here);
      if (here) {
        EXPECT_EQ(grad.abs().sum().item<double>() > 0, e == 3);
      }
    }
  });
}

}  // namespace
}  // namespace tessera::nn
