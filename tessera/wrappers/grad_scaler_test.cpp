#include "tessera/wrappers/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <optional>
#include <vector>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/fully_shard.h"
#include "tests/support/failure_of.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

constexpr int kSteps = 60;
constexpr optim::LossScaleRule kRule{
    .fixed = 0, .initial = 1024, .floor = 0x1p-20, .growth_interval = 4};

nn::Sequential net_of(comm::Communicator& ranks) {
  nn::Sequential net{nullptr};
  comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(3);
    net = nn::Sequential(nn::Linear(6, 12), nn::Tanh(), nn::Linear(12, 3));
  });
  return net;
}

at::Tensor loss_of(const at::Tensor& y) {
  return y.to(at::kFloat).square().mean();
}

at::Tensor rows_of(int step) {
  return (at::arange(24, at::kFloat) + step).sin().view({4, 6});
}

bool is_planted(int step) { return step % 7 == 2 || step % 11 == 5; }

struct Trained {
  std::vector<double> scales;
  std::vector<bool> steps;
  std::vector<at::Tensor> weights;
};

// In some steps a rank's gradient is infinite, by turns.
Trained trained(comm::Communicator& ranks, int64_t stage,
                std::optional<at::ScalarType> compute) {
  auto net = net_of(ranks);
  const auto world = ranks.world_size();
  auto model =
      fully_shard(net, mesh::DeviceMesh({.dp_shard = world}, world), ranks,
                  {.zero_stage = stage, .compute_dtype = compute});
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  GradScaler scaler(ranks.world(), kRule);
  Trained found;
  for (int step = 0; step < kSteps; ++step) {
    found.scales.push_back(scaler.value());
    optimizer.zero_grad();
    scaler.scale(loss_of(model.forward(rows_of(step)))).backward();
    if (is_planted(step) && step % world == ranks.rank()) {
      for (const auto& parameter : net->parameters()) {
        if (parameter.numel() == 0) continue;
        parameter.grad().view({-1})[0] = step % 2 ? INFINITY : NAN;
        break;
      }
    }
    if (step % 3 != 0) {
      scaler.unscale(optimizer);
      model.clip_grad_norm(0.5);
    }
    found.steps.push_back(scaler.step(optimizer));
    scaler.update();
  }
  const auto whole = model.gather();
  for (const auto& parameter : net->parameters()) {
    found.weights.push_back(parameter.detach().clone());
  }
  return found;
}

// The steps without those that are skipped, and without a scale.
std::vector<at::Tensor> weights_without(comm::Communicator& ranks) {
  auto net = net_of(ranks);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < kSteps; ++step) {
    if (is_planted(step)) continue;
    optimizer.zero_grad();
    loss_of(net->forward(rows_of(step))).backward();
    if (step % 3 != 0) nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
  }
  return net->parameters();
}

TEST(GradScaler, AllRanksSkipTheSameStepsInEveryStage) {
  optim::LossScale reference(kRule);
  std::vector<double> scales;
  for (int step = 0; step < kSteps; ++step) {
    scales.push_back(reference.value());
    reference.update(!is_planted(step));
  }
  for (const int64_t world : {1, 3}) {
    for (const int64_t stage : {1, 2, 3}) {
      for (const bool rounds : {false, true}) {
        comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
          const auto compute = rounds ? std::optional(at::kHalf) : std::nullopt;
          const Trained found = trained(ranks, stage, compute);
          EXPECT_EQ(found.scales, scales) << "stage " << stage;
          for (int step = 0; step < kSteps; ++step) {
            EXPECT_EQ(found.steps[step], !is_planted(step)) << step;
          }
          if (rounds) return;
          const auto wanted = weights_without(ranks);
          for (size_t i = 0; i < wanted.size(); ++i) {
            EXPECT_TRUE(at::allclose(found.weights[i], wanted[i], 1e-4, 1e-5))
                << "stage " << stage << " on " << world;
          }
        });
      }
    }
  }
}

TEST(GradScaler, GoesOnFromItsState) {
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    GradScaler one(ranks.world(), kRule), other(ranks.world(), kRule);
    one.load({.scale = 8, .finite_in_a_row = 3, .hysteresis_left = 1});
    other.load(one.state());
    EXPECT_EQ(other.value(), 8);
    EXPECT_EQ(other.state(), one.state());
  });
}

// As an optimizer over net->parameters() has one that is tied.
TEST(GradScaler, UnscalesATiedGradientOnce) {
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    const auto weight = at::ones({3}).requires_grad_();
    torch::optim::AdamW optimizer(std::vector<at::Tensor>{weight, weight});
    GradScaler scaler(ranks.world(), kRule);
    scaler.scale(weight.sum()).backward();
    scaler.unscale(optimizer);
    EXPECT_TRUE(at::equal(weight.grad(), at::ones({3})));
  });
}

// In words of the rule that it was given, not of the program's keys.
TEST(GradScaler, SaysThatTheScaleIsAtItsFloor) {
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    auto net = net_of(ranks);
    torch::optim::AdamW optimizer(net->parameters(), 1e-2);
    GradScaler scaler(ranks.world(), {.fixed = 0, .initial = 1, .floor = 1});
    (loss_of(net->forward(rows_of(0))) / 0).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    const auto said = testing::failure_of([&] { scaler.update(); });
    EXPECT_THAT(said, ::testing::HasSubstr("LossScaleRule::floor"));
    EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("precision.")));
  });
}

TEST(GradScaler, AnotherOrderIsRefused) {
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    auto net = net_of(ranks);
    torch::optim::AdamW optimizer(net->parameters(), 1e-2);
    GradScaler scaler(ranks.world(), kRule);
    EXPECT_THROW(scaler.update(), Error);
    scaler.scale(loss_of(net->forward(rows_of(0)))).backward();
    scaler.unscale(optimizer);
    EXPECT_THROW(scaler.unscale(optimizer), Error);
    scaler.step(optimizer);
    EXPECT_THROW(scaler.step(optimizer), Error);
    scaler.update();
  });
}

}  // namespace
}  // namespace tessera
