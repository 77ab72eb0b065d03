// Checkpoints of one model that ranks share in one way after the other, against
// LibTorch's own loop on one rank, in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/core/files.h"
#include "tessera/module_engine/sharded_checkpoint.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/moe.h"
#include "tessera/wrappers/parallelize.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/failure_of_ranks.h"
#include "tests/support/small_net.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using comm::Communicator;
using mesh::Axis;
using mesh::DeviceMesh;
using ::testing::AllOf;
using ::testing::HasSubstr;
using tests::batch_of;
using tests::expect_equal;
using tests::loss_of;
using tests::Values;
using tests::values_of;

constexpr double kLr = 1e-2;

// One parameter in two places, one that is frozen, and buffers.
nn::Sequential make_net() {
  nn::Linear twice(6, 6);
  nn::BatchNorm1d norm(6);
  nn::Sequential net(nn::Linear(5, 8), nn::Tanh(), nn::Linear(8, 6), twice,
                     twice, norm, nn::Linear(6, 3));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(3);
  for (auto& p : net->parameters()) p.normal_(0, 0.3, generator);
  norm->running_var.fill_(0.7);
  norm->eval();
  norm->bias.requires_grad_(false);
  return net;
}

const ParallelPlan kPlan = {{"0", ParallelStyle::column()},
                            {"2", ParallelStyle::row()}};

// From where the folder's newest checkpoint is: a step, which it saves.
// `train`: on what this one of `data` ranks that see other samples gets.
void go_on(ShardedCheckpoint& checkpoint, torch::optim::Optimizer& optimizer,
           int64_t data, int64_t data_rank,
           const std::function<void(const at::Tensor&)>& train) {
  const auto loaded = checkpoint.load();
  const int64_t step = loaded ? loaded->step : 0;
  optimizer.zero_grad();
  train(batch_of(step).chunk(data)[data_rank]);
  optimizer.step();
  checkpoint.save(step + 1);
}

struct Way {
  std::string name;
  int64_t world;
  std::function<void(Communicator&, nn::Sequential, const std::string& folder)>
      run;
};

Way whole(int64_t world) {
  return {c10::str("whole on ", world), world,
          [world](Communicator& ranks, nn::Sequential net,
                  const std::string& folder) {
            DistributedDataParallel model(net, ranks.world());
            torch::optim::Adam optimizer(net->parameters(), kLr);
            ShardedCheckpoint checkpoint(folder, *net, optimizer, ranks);
            go_on(checkpoint, optimizer, world, ranks.rank(),
                  [&](const at::Tensor& batch) {
                    loss_of(model.forward(batch)).backward();
                  });
          }};
}

Way cut() {
  return {
      "cut along tp", 2,
      [](Communicator& ranks, nn::Sequential net, const std::string& folder) {
        const auto tp =
            parallelize(*net, DeviceMesh({.tp = 2}, 2), ranks, kPlan);
        torch::optim::Adam optimizer(net->parameters(), kLr);
        ShardedCheckpoint checkpoint(folder, *net, optimizer, ranks);
        go_on(checkpoint, optimizer, 1, 0, [&](const at::Tensor& batch) {
          loss_of(net->forward(batch)).backward();
        });
      }};
}

Way sharded(const mesh::Degrees& degrees, int64_t stage) {
  const int64_t data = degrees.dp_shard, world = data * degrees.tp;
  return {
      c10::str("stage ", stage, " on ", world), world,
      [=](Communicator& ranks, nn::Sequential net, const std::string& folder) {
        const DeviceMesh mesh(degrees, world);
        const auto tp = parallelize(*net, mesh, ranks, kPlan);
        auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
        torch::optim::Adam optimizer(net->parameters(), kLr);
        ShardedCheckpoint checkpoint(folder, model, optimizer, ranks);
        const int64_t place = mesh.data_rank_of(mesh.coord_of(ranks.rank()));
        go_on(checkpoint, optimizer, data, place, [&](const at::Tensor& batch) {
          loss_of(model.forward(batch)).backward();
        });
      }};
}

at::Tensor loss_beside(const at::Tensor& output, const at::Tensor& /*target*/) {
  return loss_of(output);
}

Way piped(const std::string& schedule, int64_t chunks) {
  return {
      schedule, 2,
      [=](Communicator& ranks, nn::Sequential net, const std::string& folder) {
        const auto parts =
            split(net, chunks == 1 ? std::vector<int64_t>{3, 4}
                                   : std::vector<int64_t>{1, 2, 3, 1});
        std::vector<PipelineStage> stages;
        std::vector<at::Tensor> parameters;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const int64_t run = 2 * chunk + ranks.rank();
          stages.emplace_back(parts[run], run, 2 * chunks);
          for (auto& each : parts[run]->parameters()) {
            parameters.push_back(each);
          }
        }
        Schedule pipe(
            stages, ranks.world(),
            {.schedule = schedule, .num_microbatches = 2, .loss = loss_beside});
        torch::optim::Adam optimizer(parameters, kLr);
        ShardedCheckpoint checkpoint(folder, pipe.stages(), optimizer, ranks);
        go_on(checkpoint, optimizer, 1, 0,
              [&](const at::Tensor& batch) { pipe.step(batch, batch); });
      }};
}

Way piped_and_sharded(int64_t stage) {
  return {
      c10::str("1f1b in stage ", stage), 4,
      [=](Communicator& ranks, nn::Sequential net, const std::string& folder) {
        const DeviceMesh mesh({.pp = 2, .dp_shard = 2}, 4);
        const auto pipeline =
            ranks.make_group(mesh.peers(ranks.rank(), {Axis::kPp}), "pp");
        const int64_t run = pipeline->rank();
        auto part = fully_shard(split(net, std::vector<int64_t>{3, 4})[run],
                                mesh, ranks, {.zero_stage = stage});
        Schedule pipe({{part, run, 2}}, *pipeline,
                      {.num_microbatches = 3, .loss = loss_beside});
        torch::optim::Adam optimizer(part.module()->parameters(), kLr);
        ShardedCheckpoint checkpoint(folder, pipe.stages(), optimizer, ranks);
        const int64_t place = mesh.data_rank_of(mesh.coord_of(ranks.rank()));
        go_on(checkpoint, optimizer, 2, place,
              [&](const at::Tensor& batch) { pipe.step(batch, batch); });
      }};
}

void run(const Way& way, const std::string& folder) {
  SCOPED_TRACE(way.name);
  comm::run_threads(way.world, "shm", [&](Communicator& ranks) {
    nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = make_net(); });
    way.run(ranks, net, folder);
  });
}

Values one_rank(int64_t steps) {
  auto net = make_net();
  torch::optim::Adam optimizer(net->parameters(), kLr);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(net->forward(batch_of(step))).backward();
    optimizer.step();
  }
  return values_of(*net);
}

// What a module of one rank has behind it.
Values loaded(const std::string& folder) {
  Values values;
  comm::run_threads(1, "shm", [&](Communicator& ranks) {
    auto net = make_net();
    const at::NoGradGuard no_grad;
    for (auto& each : net->buffers()) each.fill_(0);
    torch::optim::Adam optimizer(net->parameters(), kLr);
    EXPECT_TRUE(ShardedCheckpoint(folder, *net, optimizer, ranks).load());
    EXPECT_EQ(net->named_buffers()["5.running_var"][0].item<double>(), 0.7);
    values = values_of(*net);
  });
  return values;
}

TEST(SharedModels, GoOnInAnyOtherWay) {
  std::vector<Way> ways = {
      whole(3), piped("1f1b", 1),        sharded({.dp_shard = 3}, 3),
      cut(),    piped_and_sharded(3),    sharded({.dp_shard = 2, .tp = 2}, 3),
      whole(1), piped("interleaved", 2), sharded({.dp_shard = 2, .tp = 2}, 1),
      whole(4), piped_and_sharded(1)};
  for (int round = 0; round < 2; ++round) {
    const TemporaryFolder folder;
    for (const Way& way : ways) run(way, folder.path());
    const auto steps = std::ssize(ways);
    expect_equal(loaded(folder.path()), one_rank(steps), 1e-10);
    std::ranges::reverse(ways);
  }
}

// Of tensors, by file of a step.
std::vector<int64_t> bytes_written(int64_t world) {
  const TemporaryFolder folder;
  run(whole(world), folder.path());
  const auto manifest =
      checkpoint::read_manifest((folder.path() / "step-1").string());
  std::vector<int64_t> bytes;
  for (const auto& file : manifest.files) {
    bytes.push_back(0);
    for (const auto& box : file.boxes) bytes.back() += box.box.numel();
  }
  return bytes;
}

// What torch::load() or to() gives a parameter is what is saved.
TEST(SharedModels, AParameterMayGetOtherMemory) {
  const TemporaryFolder folder;
  comm::run_threads(1, "shm", [&](Communicator& ranks) {
    auto net = make_net();
    torch::optim::Adam optimizer(net->parameters(), kLr);
    ShardedCheckpoint checkpoint(folder.path(), *net, optimizer, ranks);
    const at::NoGradGuard no_grad;
    for (auto& each : net->parameters()) {
      each.set_data(at::full_like(each, 3));
    }
    checkpoint.save(1);
  });
  for (const auto& each : loaded(folder.path())) {
    EXPECT_TRUE(each.eq(3).all().item<bool>());
  }
}

// Ranks that hold the same each write some of it, and nothing twice.
TEST(SharedModels, WhatSeveralHoldIsWrittenOnce) {
  const auto alone = bytes_written(1), shared = bytes_written(2);
  ASSERT_EQ(alone.size(), 1);
  ASSERT_EQ(shared.size(), 2);
  EXPECT_EQ(shared[0] + shared[1], alone[0]);
  EXPECT_GT(std::ranges::min(shared), 0.1 * static_cast<double>(alone[0]));
}

TEST(SharedModels, RefuseNamesThatTwoStagesHave) {
  const TemporaryFolder folder;
  const auto error = testing::failure_of_ranks(2, [&](Communicator& ranks) {
    const nn::Linear linear(3, 3);
    torch::optim::Adam optimizer(linear->parameters(), kLr);
    const std::vector<PipelineStage> stages = {{linear, ranks.rank(), 2}};
    ShardedCheckpoint(folder.path(), stages, optimizer, ranks);
  });
  EXPECT_THAT(error, AllOf(HasSubstr("stages 0 and 1"), HasSubstr("\"weight\""),
                           HasSubstr("as in the whole model")));
}

// Its parameters() are shards, each of which would pass for the whole.
TEST(SharedModels, RefuseAModuleWithoutWhatShardsIt) {
  const TemporaryFolder folder;
  const auto error = testing::failure_of_ranks(2, [&](Communicator& ranks) {
    nn::Sequential net(nn::Linear(4, 4));
    const auto model = fully_shard(net, DeviceMesh({.dp_shard = 2}, 2), ranks);
    torch::optim::Adam optimizer(net->parameters(), kLr);
    ShardedCheckpoint(folder.path(), *net, optimizer, ranks);
  });
  EXPECT_THAT(error, HasSubstr("Give what fully_shard() returned"));
}

TEST(SharedModels, RefuseStagesOfOnesOwnWithTheSameNames) {
  const TemporaryFolder folder;
  const auto error = testing::failure_of_ranks(2, [&](Communicator& ranks) {
    auto part = fully_shard(nn::Linear(3, 3), DeviceMesh({.pp = 2}, 2), ranks,
                            {.zero_stage = 0});
    torch::optim::Adam optimizer(part.module()->parameters(), kLr);
    ShardedCheckpoint(folder.path(), part, optimizer, ranks);
  });
  EXPECT_THAT(error, HasSubstr("stages 0 and 1"));
}

TEST(SharedModels, RefuseExpertsThatNobodyCanTellApart) {
  const TemporaryFolder folder;
  const auto error = testing::failure_of_ranks(2, [&](Communicator& ranks) {
    const DeviceMesh mesh({.dp_shard = 2, .ep = 2}, 2);
    MoE moe(4, 4, 2, [] { return nn::Linear(4, 4); }, mesh, ranks);
    torch::optim::Adam optimizer(moe->parameters(), kLr);
    ShardedCheckpoint(folder.path(), *moe, optimizer, ranks);
  });
  EXPECT_THAT(error, HasSubstr("Give the module to fully_shard()"));
}

}  // namespace
}  // namespace tessera
