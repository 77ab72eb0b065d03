#include "tessera/optim/muon.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

FlatSegment matrix(const std::string& name, const at::Tensor& parameter) {
  return {.name = name,
          .parameter = parameter,
          .gradient = at::zeros_like(parameter),
          .decay = true,
          .is_matrix = true};
}

OptimizerConfig config_of(const std::string& adjust_lr, bool nesterov = true) {
  OptimizerConfig config{.type = "muon", .lr = 0.02, .weight_decay = 0.1};
  config.muon.adjust_lr = adjust_lr;
  config.muon.nesterov = nesterov;
  return config;
}

// The formula once more, by its singular values: X_k has X_0's vectors.
at::Tensor orthogonal(const at::Tensor& of) {
  const auto [u, s, vh] = at::linalg_svd(of / of.norm(), false);
  at::Tensor values = s;
  for (int i = 0; i < 5; ++i) {
    values = 3.4445 * values - 4.7750 * values.pow(3) + 2.0315 * values.pow(5);
  }
  return u.matmul(at::diag(values)).matmul(vh);
}

double difference(const at::Tensor& one, const at::Tensor& other) {
  return ((one - other).norm() / other.norm()).item<double>();
}

TEST(Muon, EqualsItsFormulaOverTwentySteps) {
  for (const std::string adjust : {"original", "match_rms_adamw"}) {
    for (const bool nesterov : {true, false}) {
      at::manual_seed(1);
      for (const auto& shape : {std::vector<int64_t>{7, 5}, {5, 9}, {6, 6}}) {
        const at::Tensor ours = at::randn(shape, at::kDouble);
        at::Tensor theirs = ours.clone(), average = at::zeros_like(ours);
        const auto muon = make_optimizer(config_of(adjust, nesterov),
                                         {matrix("blocks.0.w", ours)});
        const double ratio = static_cast<double>(shape[0]) / shape[1];
        const double scale =
            adjust == "original"
                ? std::sqrt(std::max(1.0, ratio))
                : 0.2 * std::sqrt(std::max(shape[0], shape[1]));
        for (int step = 0; step < 20; ++step) {
          const at::Tensor gradient = at::randn(shape, at::kDouble);
          muon->segments()[0].gradient.copy_(gradient);
          muon->step(0.02);
          average = 0.95 * average + 0.05 * gradient;
          const at::Tensor update =
              nesterov ? 0.05 * gradient + 0.95 * average : average;
          theirs =
              theirs * (1 - 0.02 * 0.1) - 0.02 * scale * orthogonal(update);
        }
        EXPECT_LT(difference(ours, theirs), 1e-11) << adjust << nesterov;
      }
    }
  }
}

// Each as it would be alone, and in pieces as whole.
TEST(Muon, StackedExpertsAreMatricesByThemselves) {
  at::manual_seed(2);
  const at::Tensor stacked = at::randn({3, 6, 4}, at::kDouble);
  const at::Tensor gradient = at::randn({3, 6, 4}, at::kDouble);
  std::vector<at::Tensor> alone;
  std::vector<FlatSegment> segments;
  for (int i = 0; i < 3; ++i) {
    alone.push_back(stacked[i].clone());
    segments.push_back(matrix("w" + std::to_string(i), alone.back()));
    segments.back().gradient.copy_(gradient[i]);
  }
  const auto one =
      make_optimizer(config_of("original"), {matrix("w", stacked)});
  one->segments()[0].gradient.copy_(gradient);
  const auto three = make_optimizer(config_of("original"), segments);
  one->step(0.02);
  three->step(0.02);
  EXPECT_TRUE(at::equal(stacked, at::stack(alone)));
}

TEST(Muon, PiecesThatAreGatheredAreUpdatedAsTheWhole) {
  at::manual_seed(3);
  const at::Tensor whole = at::randn({6, 5}, at::kDouble);
  const at::Tensor gradient = at::randn({6, 5}, at::kDouble);
  const at::Tensor cut = whole.clone();
  std::vector<FlatSegment> rows = {matrix("top", cut.narrow(0, 0, 4)),
                                   matrix("bottom", cut.narrow(0, 4, 2))};
  const auto alone =
      make_optimizer(config_of("original"), {matrix("w", whole)});
  const auto shards = make_optimizer(config_of("original"), rows);
  for (int step = 0; step < 3; ++step) {
    alone->segments()[0].gradient.copy_(gradient);
    rows[0].gradient.copy_(gradient.narrow(0, 0, 4));
    rows[1].gradient.copy_(gradient.narrow(0, 4, 2));
    alone->step(0.02);
    shards->begin_step();
    const at::Tensor together = at::cat({shards->piece(0), shards->piece(1)});
    shards->step(0.02, 0, 2, [&](size_t i) -> WholePiece {
      return {together.clone(), {i == 0 ? 0 : 4, 0}};
    });
  }
  EXPECT_TRUE(at::equal(whole, cut));
}

TEST(Muon, AllElseIsAdamWs) {
  at::manual_seed(4);
  OptimizerConfig config = config_of("original");
  config.muon.adamw_lr = 0.002;
  const at::Tensor ours = at::randn({4, 3}), theirs = ours.clone();
  const at::Tensor gradient = at::randn({4, 3});
  const auto muon =
      make_optimizer(config, {{"embed", ours, gradient.clone(), true}});
  const auto adamw = make_optimizer(
      {.type = "adamw", .betas = {0.9, 0.95}, .weight_decay = 0.1},
      {{"embed", theirs, gradient.clone(), true}});
  for (int step = 0; step < 3; ++step) {
    muon->step(0.02);
    adamw->step(0.002);
  }
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-6, 1e-8));
}

TEST(Optimizer, AnAverageFollowsTheWeights) {
  at::manual_seed(5);
  const at::Tensor weight = at::randn({4, 3}, at::kDouble);
  const auto optimizer =
      make_optimizer({.type = "adamw", .ema = 0.75},
                     {{"w", weight, at::randn({4, 3}, at::kDouble), true}});
  weight.fill_(2);  // as a checkpoint's may be read by now
  at::Tensor average = weight.clone();
  for (int step = 0; step < 4; ++step) {
    optimizer->step(0.1);
    average = 0.75 * average + 0.25 * weight;
  }
  const at::Tensor before = weight.clone();
  optimizer->swap_averages();
  EXPECT_LT(difference(weight, average), 1e-14);
  optimizer->swap_averages();
  EXPECT_TRUE(at::equal(weight, before));
}

TEST(Optimizer, AnAverageIsOfTheMasters) {
  const at::Tensor weight = at::ones({4}, at::kBFloat16);
  const auto optimizer =
      make_optimizer({.type = "sgd", .ema = 0.5},
                     {{"w", weight, at::full({4}, 1e-3F), false}});
  optimizer->step(0.5);
  const at::Tensor average = optimizer->state().back().tensor;
  EXPECT_TRUE(at::allclose(average, at::full({4}, 1 - 2.5e-4F), 1e-7, 0));
  optimizer->swap_averages();
  EXPECT_TRUE(at::equal(weight, average.to(at::kBFloat16)));
  optimizer->swap_averages();
  EXPECT_TRUE(at::equal(weight, at::full({4}, 1 - 5e-4F).to(at::kBFloat16)));
}

// Arithmetic is the masters'; what is kept is rounded as bf16 is.
TEST(Optimizer, StatesInBf16AreRounded) {
  for (const std::string name : {"adamw", "adam", "lion", "muon"}) {
    at::manual_seed(6);
    const at::Tensor narrow = at::randn({4, 3}), wide = narrow.clone();
    const at::Tensor gradient = at::randn({4, 3});
    std::vector<FlatSegment> of_narrow = {matrix("w", narrow)};
    std::vector<FlatSegment> of_wide = {matrix("w", wide)};
    const auto rounded =
        make_optimizer({.type = name, .state_dtype = "bf16"}, of_narrow);
    const auto exact = make_optimizer({.type = name}, of_wide);
    for (int step = 0; step < 3; ++step) {
      of_narrow[0].gradient.copy_(gradient);
      of_wide[0].gradient.copy_(gradient);
      rounded->step(0.01);
      exact->step(0.01);
      EXPECT_TRUE(at::equal(narrow, wide)) << name << " step " << step;
      for (size_t i = 0; i < exact->state().size(); ++i) {
        if (exact->state()[i].parameter.empty()) continue;
        const at::Tensor kept = rounded->state()[i].tensor;
        const at::Tensor moment = exact->state()[i].tensor;
        EXPECT_EQ(kept.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(kept, moment.to(at::kBFloat16)));
        moment.copy_(kept);  // the next step begins with what was kept
      }
    }
  }
}

}  // namespace
}  // namespace tessera::optim
