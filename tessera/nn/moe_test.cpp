#include "tessera/nn/moe.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/random.h"

namespace tessera::nn {
namespace {

constexpr int64_t kWidth = 6, kExperts = 4;

std::shared_ptr<Moe> make(int64_t top_k) {
  auto moe = std::make_shared<Moe>(
      MoeOptions{.router = {.experts = kExperts, .top_k = top_k},
                 .expert = {.width = kWidth, .hidden = 5}});
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
      const auto e = picked[i].item<int64_t>();
      const auto of_expert = [e](const GroupedLinear& linear,
                                 const at::Tensor& rows) {
        return at::linear(rows, linear.weight()[e]);
      };
      const Experts& all = *moe.experts();
      const at::Tensor hidden =
          at::silu(of_expert(*all.gate(), token)) * of_expert(*all.up(), token);
      y = y + best[i] / best.sum() * of_expert(*all.down(), hidden);
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
      expect_close(mine[next++], each.grad());
    }
  }
}

// As if it were alone, also in a part of the stack.
TEST(Moe, AnExpertHasTheBitsOfItsOwnName) {
  const auto moe = make(/*top_k=*/2);
  const at::Tensor& stacked = moe->experts()->gate()->weight();
  const at::Tensor alone = at::empty({5, kWidth}, at::kDouble);
  random::Stream(7, "experts.2.gate.weight")
      .fill_normal(alone.mutable_data_ptr<double>(), 0, 5 * kWidth, 0.0, 0.02);
  EXPECT_TRUE(at::equal(stacked[2], alone));

  Moe part(MoeOptions{.router = {.experts = kExperts},
                      .expert = {.width = kWidth, .hidden = 5}});
  mesh::Layout& layout = part.experts()->gate()->spec("weight")->layout;
  layout = layout.with(mesh::Axis::kEp, mesh::Placement::shard(0))
               .with(mesh::Axis::kExpertDp, mesh::Placement::shard(1));
  const mesh::DeviceMesh mesh({.dp_shard = 4, .ep = 2}, 4);
  materialise(part, mesh, mesh.coord_of(3), {.seed = 7, .dtype = at::kDouble});
  EXPECT_TRUE(at::equal(part.experts()->gate()->weight(),
                        stacked.narrow(0, 2, 2).narrow(1, 3, 2)));
}

// k where the load is even; E where one expert has it all (k 1).
TEST(Moe, BalanceOfEvenAndOneSidedLoads) {
  const at::NoGradGuard no_grad;
  for (const auto& [scale, loss] : {std::pair{0.0, 1.0}, {1e3, 4.0}}) {
    const auto moe = make(/*top_k=*/1);
    moe->gate()->weight().zero_();
    moe->gate()->weight()[2].fill_(scale);
    Balance balance;
    moe->forward(at::ones({3, 8, kWidth}, at::kDouble), {.balance = &balance});
    moe->forward(at::ones({1, 8, kWidth}, at::kDouble), {.balance = &balance});
    EXPECT_NEAR(balance.loss.item<double>(), 4 * loss, 1e-12);
    const at::Tensor load = balance.counts[0].narrow(0, 0, kExperts);
    EXPECT_EQ(load.sum().item<double>(), 32);
    if (scale > 0) {
      EXPECT_EQ(load[2].item<double>(), 32);
    }
  }
}

}  // namespace
}  // namespace tessera::nn
