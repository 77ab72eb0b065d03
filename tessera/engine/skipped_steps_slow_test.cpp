// Steps whose gradient is made infinite on one rank: all ranks of all axes skip
// them, and find the same scale of the loss.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/random.h"
#include "tessera/engine/rank_model.h"
#include "tessera/nn/parameter.h"
#include "tests/support/small_steps.h"

namespace tessera::engine {
namespace {

using program::Instruction;
using program::Op;

constexpr int kSteps = 200, kGrowthInterval = 8;
constexpr double kInitialScale = 1024;

struct Mesh {
  const char* name;
  int64_t world;
  std::function<void(RunConfig&)> set;
};

const std::vector<Mesh>& meshes() {
  static const std::vector<Mesh> all = {
      {"one rank", 1, [](RunConfig&) {}},
      {"dp 2", 2, [](RunConfig& c) { c.mesh.dp = 2; }},
      {"zero 1", 2, [](RunConfig& c) { c.mesh.dp = 2, c.zero.stage = 1; }},
      {"zero 2", 2, [](RunConfig& c) { c.mesh.dp = 2, c.zero.stage = 2; }},
      {"zero 3", 2, [](RunConfig& c) { c.mesh.dp = 2, c.zero.stage = 3; }},
      {"hybrid", 4,
       [](RunConfig& c) {
         c.mesh.dp_replicate = c.mesh.dp_shard = 2;
         c.zero.stage = 3;
       }},
      {"tp 2", 2, [](RunConfig& c) { c.mesh.tp = 2; }},
      {"cp 2", 2, [](RunConfig& c) { c.mesh.cp = 2; }},
      {"pp 2", 2, [](RunConfig& c) { c.mesh.pp = 2; }},
      {"pp 2, interleaved", 2,
       [](RunConfig& c) {
         c.mesh.pp = 2;
         c.pipeline.schedule = "interleaved";
         c.pipeline.chunks = 2;
       }},
      {"ep 2", 2,
       [](RunConfig& c) {
         c.model.family = "mixtral";
         c.model.moe.experts = 2;
         c.mesh.dp = c.mesh.ep = 2;
       }},
      {"pp 2 x zero 3 x tp 2", 8, [](RunConfig& c) {
         c.mesh.pp = c.mesh.tp = 2;
         c.zero.stage = 3;
       }}};
  return all;
}

RunConfig config_of(const Mesh& mesh, const char* compute) {
  RunConfig config = testing::smallest_run();
  mesh.set(config);
  config.batch = {.global = 4, .micro = 1};
  config.precision = {.compute = compute,
                      .loss_scale = 0,
                      .initial_loss_scale = kInitialScale,
                      .scale_growth_interval = kGrowthInterval,
                      .min_loss_scale = 0x1p-60};
  complete(config, mesh.world);
  return config;
}

std::vector<bool> planted_steps(int count) {
  const random::Stream stream(5, "planted");
  std::vector<bool> planted;
  for (int step = 0; step < count; ++step) {
    planted.push_back(stream.uniform(step) < 0.1);
  }
  return planted;
}

// What one rank has of each step.
struct Seen {
  std::vector<double> scales, losses, norms;
  std::vector<bool> skipped;
  int64_t updates = 0;
};

// Into the first micro-batch's gradient, before anything is reduced: a matrix
// of a block, of which every rank that has it holds a part or sums up a share.
program::Observer plant_in(RankModel& model) {
  return
      [&, is_planted = false](const Instruction& done, double, double) mutable {
        const bool is_backward =
            done.op == Op::kBackward || done.op == Op::kBackwardWeight;
        if (!is_backward || is_planted) return;
        model.composed().parameters->complete_gradients(done.version);
        for (const auto& parameter : nn::parameters_of(model.decoder())) {
          const at::Tensor& gradient = parameter.tensor.grad();
          const bool is_its =
              std::ranges::count(parameter.spec->units, done.unit) > 0;
          if (!is_its || !gradient.defined() ||
              !parameter.name.ends_with("attention.q.weight")) {
            continue;
          }
          gradient.view({-1})[0] = INFINITY;
          is_planted = true;
          return;
        }
      };
}

at::Tensor sums_of_shards(RankModel& model) {
  std::vector<at::Tensor> sums;
  for (const auto& each : model.composed().parameters->parameters()) {
    sums.push_back(each.shard.sum(at::kDouble));
  }
  for (const auto& each : model.optimizer().state()) {
    sums.push_back(each.tensor.sum(at::kDouble));
  }
  return at::stack(sums);
}

std::vector<Seen> trained(const Mesh& mesh, const RunConfig& config,
                          const std::vector<bool>& planted) {
  std::vector<Seen> seen(mesh.world);
  comm::run_threads(mesh.world, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    Seen& mine = seen[ranks.rank()];
    const int steps = static_cast<int>(planted.size());
    for (int step = 0; step < steps; ++step) {
      const bool here = planted[step] && step % mesh.world == ranks.rank();
      const at::Tensor before = sums_of_shards(model);
      model.step(step_input(config, step, 1e-3, testing::drawn_batches(config)),
                 here ? plant_in(model) : nullptr);
      ModelActor& actor = model.actor();
      mine.scales.push_back(actor.scale());
      mine.skipped.push_back(actor.was_skipped());
      mine.norms.push_back(actor.grad_norm());
      const at::Tensor loss =
          at::tensor({actor.loss_sum(), actor.weight()}, at::kDouble);
      ranks.world().all_reduce(loss).synchronize();
      mine.losses.push_back((loss[0] / loss[1]).item<double>());
      if (!actor.was_skipped()) continue;
      EXPECT_TRUE(at::equal(sums_of_shards(model), before))
          << mesh.name << ", step " << step;
      const auto names = actor.nonfinite_parameters();
      if (config.zero.stage == 0 && config.mesh.pp == 1 && here) {
        EXPECT_EQ(names.size(), 1);
      }
    }
    mine.updates = model.optimizer().steps();
  });
  return seen;
}

// torch.amp.GradScaler's update: see optim/loss_scale_test.cpp.
std::vector<double> scales_of_grad_scaler(const std::vector<bool>& planted) {
  std::vector<double> scales;
  double scale = kInitialScale;
  int in_a_row = 0;
  for (const bool found_inf : planted) {
    scales.push_back(scale);
    in_a_row = found_inf ? 0 : in_a_row + 1;
    if (found_inf) scale /= 2;
    if (in_a_row < kGrowthInterval) continue;
    scale *= 2;
    in_a_row = 0;
  }
  return scales;
}

TEST(SkippedSteps, AreThoseOfGradScaler) {
  const auto planted = planted_steps(kSteps);
  const auto scales = scales_of_grad_scaler(planted);
  const auto skips = std::ranges::count(planted, true);
  for (const Mesh& mesh : meshes()) {
    if (mesh.world > 2) continue;  // they have fewer steps, in fp64
    for (const Seen& rank : trained(mesh, config_of(mesh, "fp16"), planted)) {
      EXPECT_EQ(rank.scales, scales) << mesh.name;
      EXPECT_EQ(rank.skipped, planted) << mesh.name;
      EXPECT_EQ(rank.updates, kSteps - skips) << mesh.name;
    }
  }
}

// In fp64 a scale, which is a power of two, changes nothing: on all meshes, and
// beside a run that has no step of those that are skipped.
TEST(SkippedSteps, InFp64AllMeshesEqualOneRank) {
  constexpr int kFewer = 40;
  const auto planted = planted_steps(kFewer);
  const Seen one =
      trained(meshes()[0], config_of(meshes()[0], "fp64"), planted).front();
  for (const Mesh& mesh : meshes()) {
    const RunConfig config = config_of(mesh, "fp64");
    if (config.model.moe.experts > 0) continue;  // another model
    const Seen other = trained(mesh, config, planted).front();
    EXPECT_EQ(other.scales, one.scales) << mesh.name;
    EXPECT_EQ(other.skipped, planted) << mesh.name;
    for (int step = 0; step < kFewer; ++step) {
      EXPECT_NEAR(other.losses[step], one.losses[step],
                  1e-10 * one.losses[step])
          << mesh.name << ", step " << step;
      if (planted[step]) continue;
      EXPECT_NEAR(other.norms[step], one.norms[step], 1e-10 * one.norms[step]);
    }
  }
}

std::vector<at::Tensor> gradient_squares(RankModel& model) {
  std::vector<at::Tensor> all;
  for (const auto& each : model.composed().parameters->trained()) {
    all.push_back(each.gradient.to(at::kDouble).square().sum());
  }
  return all;
}

// Hidden states are alike, and token 0 overflows in the head: the loss of these
// targets is infinite, while gradients are large, and 0 before the norm.
void make_loss_infinite(RankModel& model, int64_t width) {
  const at::NoGradGuard no_grad;
  for (const auto& each : model.composed().parameters->parameters()) {
    const at::Tensor values = each.shard.view({-1});
    if (each.name == "final_norm.weight") values.fill_(0);
    if (each.name == "final_norm.bias") values.fill_(1e20);
    if (each.name == "head.weight") values.narrow(0, 0, width).fill_(-1e20);
  }
}

TEST(SkippedSteps, ALossThatIsNotFiniteEndsStagesThatDoNotHoldItToo) {
  RunConfig config = testing::small_run(1, 0);
  config.model.family = "gpt2";
  config.mesh.pp = 2;
  complete(config, 2);
  const auto zeros = [&](int64_t, int64_t, int64_t count) {
    const at::Tensor ids = at::zeros({count, config.data.seq_len}, at::kLong);
    return data::Batch{ids, ids};
  };
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    make_loss_infinite(model, config.model.hidden);
    const at::Tensor before = sums_of_shards(model);
    EXPECT_THROW(model.step(step_input(config, /*step=*/0, 1e-3, zeros)),
                 tessera::Error);
    EXPECT_TRUE(
        std::isfinite(at::stack(gradient_squares(model)).sum().item<double>()));
    EXPECT_TRUE(at::equal(sums_of_shards(model), before));
  });
}

}  // namespace
}  // namespace tessera::engine
