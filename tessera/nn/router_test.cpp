#include "tessera/nn/router.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/nn/moe.h"

namespace tessera::nn {
namespace {

at::Tensor products() {
  return at::tensor({1.0, 3.0, 2.0, 0.0, -1.0, 2.5}, at::kDouble).view({1, -1});
}

std::vector<int64_t> numbers(const at::Tensor& t) {
  const at::Tensor flat = std::get<0>(t.flatten().sort());
  const auto* first = flat.const_data_ptr<int64_t>();
  return {first, first + flat.numel()};
}

using Numbers = std::vector<int64_t>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST(Router, WeightsOfSigmoidsAreNormalisedAndScaled) {
  const Routing routing = route(
      products(), {},
      {.experts = 6, .top_k = 2, .score = GateScore::kSigmoid, .scale = 2});
  EXPECT_EQ(numbers(routing.experts), (Numbers{1, 5}));
  const double a = sigmoid(3.0), b = sigmoid(2.5);
  EXPECT_NEAR(routing.weights.max().item<double>(), 2 * a / (a + b), 1e-14);
  EXPECT_NEAR(routing.weights.sum().item<double>(), 2, 1e-14);
  EXPECT_NEAR(routing.probabilities.sum().item<double>(), 1, 1e-14);
}

TEST(Router, ABiasMovesChoicesAlone) {
  const at::Tensor bias = at::tensor({0., 0., 0., 5., 0., 0.}, at::kDouble);
  const Routing routing =
      route(products(), bias, {.experts = 6, .top_k = 2, .normalize = false});
  EXPECT_EQ(numbers(routing.experts), (Numbers{1, 3}));
  const at::Tensor p = at::softmax(products(), -1);
  EXPECT_NEAR(routing.weights.sum().item<double>(),
              (p[0][1] + p[0][3]).item<double>(), 1e-14);
}

// Of three groups the second has the two largest together, though the third
// has the second largest alone.
TEST(Router, TokensStayInTheirBestGroups) {
  const Routing routing = route(
      products(), {}, {.experts = 6, .top_k = 2, .groups = 3, .top_groups = 1});
  EXPECT_EQ(numbers(routing.experts), (Numbers{0, 1}));
  const at::Tensor z =
      at::tensor({1.8, 1.9, 2.0, 0.0}, at::kDouble).view({1, -1});
  const Routing two =
      route(z, {}, {.experts = 4, .top_k = 2, .groups = 2, .top_groups = 1});
  EXPECT_EQ(numbers(two.experts), (Numbers{0, 1}));
}

// In the order of positions, then of choices; samples apart.
TEST(Router, CapacityTakesWhatComesFirst) {
  const at::Tensor choices =
      at::tensor({0, 1, 0, 1, 1, 0, 2, 0, 2, 2, 2, 2}, at::kLong)
          .view({2, 3, 2});
  const at::Tensor kept = within_capacity(choices, /*experts=*/3, 2);
  const at::Tensor expected =
      at::tensor({1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0}, at::kLong)
          .to(at::kBool)
          .view({2, 3, 2});
  EXPECT_TRUE(at::equal(kept, expected)) << kept;
  EXPECT_EQ(capacity_of(1.25, 8, 2, 4), 5);
  EXPECT_EQ(capacity_of(0.1, 8, 2, 4), 0);
  EXPECT_EQ(capacity_of(1.15, 400, 1, 4), 115);
  EXPECT_EQ(capacity_of(1.149, 400, 1, 4), 114);
  EXPECT_EQ(room_of(1.25, 8, 2, 4), 5);
  EXPECT_EQ(room_of(1.0, 15, 8, 128), 1);  // of 0.94
  EXPECT_EQ(room_of(9, 8, 2, 4), 8);
}

constexpr int64_t kWidth = 6, kExperts = 4;

std::shared_ptr<Moe> make(const MoeOptions& given,
                          at::ScalarType dtype = at::kDouble) {
  MoeOptions options = given;
  options.router.experts = kExperts;
  options.expert = {.width = kWidth, .hidden = 5};
  auto moe = std::make_shared<Moe>(options);
  materialise(*moe, {.seed = 7, .dtype = dtype});
  return moe;
}

at::Tensor sample(int64_t tokens) {
  at::manual_seed(1);
  return at::randn({1, tokens, kWidth}, at::kDouble).requires_grad_();
}

// All tokens want expert 2, of which the first alone are within its capacity;
// in generation nothing is dropped.
TEST(Moe, WhatIsDroppedAddsNothing) {
  const auto moe = make({.router = {.top_k = 1}, .capacity_factor = 1});
  const at::NoGradGuard no_grad;
  moe->gate()->weight().zero_();
  moe->gate()->weight()[2].fill_(10);
  const at::Tensor x = sample(8).abs();
  Balance balance;
  const at::Tensor y =
      moe->forward(x, {.positions = {{0, 8}}, .balance = &balance});
  const at::Tensor whole = moe->forward(x);
  EXPECT_TRUE(at::allclose(y.narrow(1, 0, 2), whole.narrow(1, 0, 2)));
  EXPECT_EQ(y.narrow(1, 2, 6).abs().sum().item<double>(), 0);
  EXPECT_EQ(balance.counts[0][2].item<double>(), 2);
  EXPECT_EQ(balance.counts[0][kExperts].item<double>(), 6);
}

TEST(Moe, TheGradientOfTheBiasIsTheExcessOfChoices) {
  const auto moe =
      make({.router = {.top_k = 2}, .has_bias = true, .moves_bias = true});
  Balance balance;
  const at::Tensor x = sample(6);
  (3 * moe->forward(x, {.balance = &balance}).sum()).backward();
  const at::Tensor load = balance.counts[0].narrow(0, 0, kExperts);
  EXPECT_TRUE(at::equal(moe->bias().grad(), load * kExperts - 6 * 2));
}

// What is added to all of them moves no choice; bf16 has steps of 1/32 there.
TEST(Moe, TheBiasOfAModelOfBf16IsFp32) {
  const auto moe =
      make({.router = {.top_k = 2}, .has_bias = true}, at::kBFloat16);
  const at::NoGradGuard no_grad;
  at::Tensor bias = moe->bias();
  ASSERT_EQ(bias.scalar_type(), at::kFloat);
  bias.copy_(at::arange(kExperts, at::kFloat) / 256);
  const at::Tensor x = sample(50).to(at::kBFloat16);
  const at::Tensor y = moe->forward(x);
  bias.add_(7.5);
  EXPECT_TRUE(at::equal(moe->forward(x), y));
  bias.copy_(bias.to(at::kBFloat16));
  EXPECT_FALSE(at::equal(moe->forward(x), y));
}

TEST(Moe, SharedExpertsAreAddedForEveryToken) {
  const auto moe = make({.shared_width = 7});
  const auto plain = make({});
  const at::NoGradGuard no_grad;
  const at::Tensor x = sample(5);
  EXPECT_TRUE(at::allclose(moe->forward(x),
                           plain->forward(x) + moe->shared()->forward(x)));
}

TEST(Moe, PenaltyIsTheWeightedLossAndTheSquaredLogSumExp) {
  const auto moe = make({.aux_loss = 0.5, .z_loss = 2});
  const at::NoGradGuard no_grad;
  const at::Tensor x = sample(5);
  Balance balance;
  moe->forward(x, {.balance = &balance});
  const at::Tensor z = moe->gate()->forward(x[0]).logsumexp(-1);
  EXPECT_NEAR(balance.penalty.item<double>(),
              (0.5 * balance.loss + 2 * z.square().mean()).item<double>(),
              1e-12);
}

// Larger ones behind the sample, which experts would rather take.
TEST(Moe, WhatFillsASampleUpTakesNoPlace) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = sample(6);
  const at::Tensor padded = at::cat({x, 5 * x.narrow(1, 0, 2)}, /*dim=*/1);
  for (const auto choice : {GateChoice::kTokens, GateChoice::kExperts}) {
    const auto moe =
        make({.router = {.top_k = 1, .choice = choice}, .capacity_factor = 1});
    const at::Tensor alone = moe->forward(x, {.positions = {{0, 6}}});
    const at::Tensor y =
        moe->forward(padded, {.positions = {{0, 8}}, .unpadded = 6});
    EXPECT_TRUE(at::allclose(y.narrow(1, 0, 6), alone, 1e-12, 1e-14));
    EXPECT_EQ(y.narrow(1, 6, 2).abs().sum().item<double>(), 0);
  }
}

// By hand: of tokens (0.1, 0.5), (0.4, 0.2), (0.3, 0.9), and of another sample.
TEST(Router, AnExpertTakesItsBestTokensOfASample) {
  const at::Tensor scores =
      at::tensor({0.1, 0.5, 0.4, 0.2, 0.3, 0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4},
                 at::kDouble)
          .view({2, 3, 2});
  const at::Tensor expected =
      at::tensor({0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0}, at::kLong)
          .to(at::kBool)
          .view({2, 3, 2});
  EXPECT_TRUE(at::equal(taken_tokens(scores, 2), expected));
  // The first of those that rounding alone tells apart.
  const at::Tensor alike =
      at::tensor({0.3, 0.3 + 1e-15, 0.3 - 1e-15}, at::kDouble).view({1, 3, 1});
  EXPECT_TRUE(taken_tokens(alike, 1)[0][0].item<bool>());
}

TEST(Moe, ATokenThatNoExpertTakesGetsNothing) {
  const auto moe = make({.router = {.top_k = 1, .choice = GateChoice::kExperts},
                         .capacity_factor = 1});
  const at::Tensor x = sample(8);
  Balance balance;
  const at::Tensor y =
      moe->forward(x, {.positions = {{0, 8}}, .balance = &balance});
  const at::Tensor p = at::softmax(moe->gate()->forward(x), -1);
  const at::Tensor taken = taken_tokens(p, 2)[0];
  at::Tensor sum = at::zeros_like(x[0]);
  for (int64_t e = 0; e < kExperts; ++e) {
    std::vector<int64_t> splits(kExperts, 0);
    splits[e] = 8;
    const at::Tensor weights = p[0].select(1, e) * taken.select(1, e);
    sum = sum + moe->experts()->forward(x[0], RowGroups(splits)) *
                    weights.unsqueeze(1);
  }
  EXPECT_TRUE(at::allclose(y[0], sum, 1e-12, 1e-14));
  const at::Tensor idle = taken.logical_not().all(1);
  EXPECT_EQ(balance.counts[0][kExperts].item<double>(),
            idle.sum().item<double>());
  const at::Tensor load = balance.counts[0].narrow(0, 0, kExperts);
  EXPECT_TRUE(at::equal(load, at::full_like(load, 2)));
  const at::Tensor direction = at::randn_like(x).detach();
  (y * direction).sum().backward();
  const at::Tensor gradient = moe->gate()->weight().grad().clone();
  moe->zero_grad();
  (sum * direction[0]).sum().backward();
  EXPECT_TRUE(
      at::allclose(gradient, moe->gate()->weight().grad(), 1e-10, 1e-14));
}

// A part of the tokens, of later samples, has the bits that all have.
TEST(Router, NoiseIsOfSampleAndPosition) {
  const auto of = [](int64_t first_sample, const Positions& positions,
                     int64_t samples, at::ScalarType type) {
    return gate_noise({.seed = 3, .step = 5, .first_sample = first_sample},
                      /*layer=*/1, positions, samples, /*experts=*/3, type);
  };
  const at::Tensor all = of(4, {{0, 16}}, 2, at::kDouble).view({2, 16, 3});
  const at::Tensor part = of(5, {{2, 3}, {9, 4}}, 1, at::kDouble);
  EXPECT_TRUE(at::equal(
      part, at::cat({all[1].narrow(0, 2, 3), all[1].narrow(0, 9, 4)})));
  const at::Tensor narrow = of(4, {{0, 16}}, 2, at::kFloat);
  EXPECT_TRUE(at::equal(narrow, all.view({-1, 3}).to(at::kFloat)));
  const at::Tensor many = of(0, {{0, 4096}}, 1, at::kDouble);
  EXPECT_NEAR(many.mean().item<double>(), 0, 0.03);
  EXPECT_NEAR(many.std().item<double>(), 1, 0.03);
}

TEST(Moe, NoiseIsAddedInTrainingAlone) {
  const auto moe = make({.router = {.top_k = 2}, .has_noise = true});
  const at::NoGradGuard no_grad;
  moe->noise()->weight().normal_();
  const at::Tensor x = sample(8);
  const Draw draw{.seed = 1};
  Balance balance, plain;
  const Positions positions = {{0, 8}};
  moe->forward(x, {.positions = positions, .balance = &balance, .draw = &draw});
  moe->forward(x, {.positions = positions, .balance = &plain});
  const auto z = [&](const Linear& gate) { return gate.forward(x[0]); };
  const at::Tensor noisy = z(*moe->gate()) + gate_noise(draw, 0, positions, 1,
                                                        kExperts, at::kDouble) *
                                                 at::softplus(z(*moe->noise()));
  const auto entropy = [](const at::Tensor& products) {
    const at::Tensor p = at::softmax(products, -1);
    return -(p * p.log()).sum().item<double>();
  };
  const int64_t last = kExperts + 1;
  EXPECT_NEAR(balance.counts[0][last].item<double>(), entropy(noisy), 1e-12);
  EXPECT_NEAR(plain.counts[0][last].item<double>(), entropy(z(*moe->gate())),
              1e-12);
}

// As transformers has it: a product of means over all layers.
TEST(Moe, ABalanceOfABatchIsOfAllLayersTogether) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::cat({sample(5), -sample(5)});
  Balance balance;
  BatchLoad load;
  at::Tensor probabilities = at::zeros({kExperts}, at::kDouble);
  at::Tensor chosen = at::zeros({kExperts}, at::kDouble);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const auto moe = make({.balance = BalanceOver::kBatch,
                           .aux_loss = 0.5,
                           .layer = layer,
                           .layers = 2});
    moe->gate()->weight().mul_(static_cast<double>(1 + 40 * layer));
    moe->forward(x, {.balance = &balance, .load = &load});
    const at::Tensor p = at::softmax(moe->gate()->forward(x.flatten(0, 1)), -1);
    probabilities += p.sum(0);
    chosen += balance.counts[layer].narrow(0, 0, kExperts);
  }
  EXPECT_FALSE(balance.loss.defined());
  settle(balance, load);
  const at::Tensor loss = (probabilities / 20 * (chosen / 20)).sum() * kExperts;
  // Once for each sample and layer, as a mean over these wants it.
  EXPECT_NEAR(balance.loss.item<double>(), 4 * loss.item<double>(), 1e-12);
  EXPECT_NEAR(balance.penalty.item<double>(), 2 * loss.item<double>(), 1e-12);
}

}  // namespace
}  // namespace tessera::nn
