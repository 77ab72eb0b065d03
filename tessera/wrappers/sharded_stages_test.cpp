// Stages of a pipeline that fully_shard() shares out, and parallelize() cuts,
// against the unsplit module on one rank, in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/wrappers/parallelize.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/failure_of_ranks.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using mesh::Axis;
using mesh::DeviceMesh;
using ::testing::HasSubstr;

constexpr int64_t kRows = 32, kSteps = 3, kMicrobatches = 4;
constexpr double kMostNorm = 0.05;  // below what gradients have

nn::Sequential make_net() {
  torch::manual_seed(7);
  nn::Sequential net(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 6),
                     nn::LayerNorm(nn::LayerNormOptions({6})),
                     nn::Linear(6, 12), nn::Tanh(), nn::Linear(12, 5),
                     nn::Linear(5, 4));
  net->to(at::kDouble);
  net->named_parameters()["3.bias"].requires_grad_(false);
  return net;
}

nn::Sequential net_in_turn(comm::Communicator& ranks) {
  nn::Sequential net{nullptr};
  comm::in_turn(ranks.world(), [&] { net = make_net(); });
  return net;
}

at::Tensor numbers(int64_t columns, double by) {
  return at::arange(kRows * columns, at::kDouble)
      .mul(by)
      .sin()
      .view({kRows, columns});
}
at::Tensor inputs_of(int64_t step) { return numbers(6, 0.37 + step); }
at::Tensor targets_of(int64_t step) { return numbers(4, 0.61 + step); }

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

struct Trained {
  std::map<std::string, at::Tensor> parameters;
  double loss = 0, norm = 0;
};

const Trained& unsplit() {
  static const Trained trained = [] {
    auto net = make_net();
    torch::optim::Adam optimizer(net->parameters(), 1e-2);
    Trained run;
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const auto loss =
          loss_of(net->forward(inputs_of(step)), targets_of(step));
      loss.backward();
      run.norm = nn::utils::clip_grad_norm_(net->parameters(), kMostNorm);
      optimizer.step();
      run.loss = loss.item<double>();
    }
    for (const auto& each : net->named_parameters()) {
      run.parameters[each.key()] = each.value().detach();
    }
    return run;
  }();
  return trained;
}

const ParallelPlan kPlan = {{"0", ParallelStyle::column()},
                            {"2", ParallelStyle::row()},
                            {"4", ParallelStyle::column()},
                            {"6", ParallelStyle::row()}};

struct Ways {
  mesh::Degrees degrees;
  FullyShardOptions options;
  std::string schedule = "1f1b";
  std::vector<int64_t> lengths = {3, 5};  // of parts
};

void expect_as_unsplit(const Ways& ways) {
  const auto& degrees = ways.degrees;
  const int64_t chunks = std::ssize(ways.lengths) / degrees.pp;
  const int64_t world =
      degrees.pp * degrees.dp_replicate * degrees.dp_shard * degrees.tp;
  const DeviceMesh mesh(degrees, world);
  comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
    auto net = net_in_turn(ranks);
    std::vector<Parallelized> cut;
    if (chunks > 1) cut.push_back(parallelize(*net, mesh, ranks, kPlan));
    auto parts = split(net, ways.lengths);
    const auto pipeline =
        ranks.make_group(mesh.peers(ranks.rank(), {Axis::kPp}), "pp");
    std::vector<FullySharded<nn::Sequential>> shards;
    shards.reserve(chunks);
    std::vector<PipelineStage> stages;
    std::vector<at::Tensor> parameters;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t run = chunk * degrees.pp + pipeline->rank();
      if (chunks == 1) {
        cut.push_back(parallelize(*parts[run], mesh, ranks, kPlan));
      }
      shards.push_back(fully_shard(parts[run], mesh, ranks, ways.options));
      stages.emplace_back(shards.back(), run, degrees.pp * chunks);
      for (const auto& each : parts[run]->parameters()) {
        parameters.push_back(each);
      }
    }
    Schedule schedule(std::move(stages), *pipeline,
                      {.schedule = ways.schedule,
                       .num_microbatches = kMicrobatches,
                       .loss = loss_of});
    torch::optim::Adam optimizer(parameters, 1e-2);
    const int64_t data = degrees.dp_replicate * degrees.dp_shard;
    const int64_t place = mesh.data_rank_of(mesh.coord_of(ranks.rank()));
    const auto own = [&](const at::Tensor& batch) {
      return batch.chunk(data)[place];
    };
    double norm = 0;
    at::Tensor loss;
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss = at::full(
          {1}, schedule.step(own(inputs_of(step)), own(targets_of(step))).loss,
          at::kDouble);
      norm = schedule.clip_grad_norm(kMostNorm);
      optimizer.step();
    }
    ranks.world().all_reduce(loss, comm::ReduceOp::kMean).synchronize();
    EXPECT_NEAR(loss.item<double>(), unsplit().loss, 1e-12);
    EXPECT_NEAR(norm, unsplit().norm, 1e-12);
    for (auto& each : shards) {
      for (const auto& shard : each.shards()) {
        const at::Tensor& wanted = unsplit().parameters.at(shard.name);
        EXPECT_EQ(wanted.sizes(), shard.shape) << shard.name;
        at::Tensor part = wanted;
        for (size_t dim = 0; dim < shard.box.size.size(); ++dim) {
          part = part.narrow(static_cast<int64_t>(dim), shard.box.offset[dim],
                             shard.box.size[dim]);
        }
        EXPECT_TRUE(at::allclose(shard.values, part, 1e-10, 1e-12))
            << shard.name;
      }
    }
  });
}

TEST(ShardedStages, EveryStageOfZeroTrainsWhatTheUnsplitModuleDoes) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    for (const bool reshards : {true, false}) {
      if (stage < 3 && !reshards) continue;
      SCOPED_TRACE(c10::str("stage ", stage, reshards ? "" : ", keeps"));
      expect_as_unsplit({.degrees = {.pp = 2, .dp_shard = 2},
                         .options = {.zero_stage = stage,
                                     .reshard_after_forward = reshards}});
    }
  }
}

TEST(ShardedStages, EverySchedule) {
  for (const auto& schedule : program::schedules::all()) {
    const bool has_turns =
        schedule.placement == program::Placement::kRoundRobin;
    if (schedule.delayed || !has_turns) continue;  // or other places
    SCOPED_TRACE(schedule.name);
    expect_as_unsplit({.degrees = {.pp = 2, .dp_shard = 2, .tp = 2},
                       .schedule = schedule.name,
                       .lengths = schedule.chunked
                                      ? std::vector<int64_t>{1, 2, 3, 2}
                                      : std::vector<int64_t>{3, 5}});
  }
}

TEST(ShardedStages, WithTensorParallelismAndReplicas) {
  expect_as_unsplit(
      {.degrees = {.pp = 2, .tp = 2}, .options = {.zero_stage = 0}});
  for (const int64_t stage : {1, 3}) {
    SCOPED_TRACE(stage);
    expect_as_unsplit({.degrees = {.pp = 2, .dp_shard = 2, .tp = 2},
                       .options = {.zero_stage = stage}});
    expect_as_unsplit({.degrees = {.pp = 2, .dp_replicate = 2, .dp_shard = 2},
                       .options = {.zero_stage = stage}});
  }
  expect_as_unsplit({.degrees = {.dp_shard = 2, .tp = 2}, .lengths = {8}});
}

// Tied weights count once.
TEST(ShardedStages, TheNormOfWholeStages) {
  const auto make = [] {
    torch::manual_seed(4);
    nn::Linear twice(6, 6);
    nn::Sequential net(twice, nn::Tanh(), twice, nn::Linear(6, 4));
    net->to(at::kDouble);
    return net;
  };
  auto alone = make();
  loss_of(alone->forward(inputs_of(0)), targets_of(0)).backward();
  double squares = 0;
  for (const auto* name : {"0.weight", "0.bias", "3.weight", "3.bias"}) {
    const auto gradient = alone->named_parameters()[name].grad();
    squares += gradient.square().sum().item<double>();
  }
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = make(); });
    const PipelineStage stage(split(net, {3, 1})[ranks.rank()], ranks.rank(),
                              2);
    Schedule pipe({stage}, ranks.world(),
                  {.num_microbatches = kMicrobatches, .loss = loss_of});
    pipe.step(inputs_of(0), targets_of(0));
    EXPECT_NEAR(pipe.clip_grad_norm(kMostNorm), std::sqrt(squares), 1e-12);
    EXPECT_NEAR(pipe.clip_grad_norm(1.0), kMostNorm, 1e-6);
    pipe.clip_grad_norm(0);
    EXPECT_EQ(pipe.clip_grad_norm(1.0), 0);
  });
}

TEST(ShardedStages, RefusesWhatDoesNotGoTogether) {
  const DeviceMesh mesh({.pp = 2}, 2);
  const FullyShardOptions kWhole{.zero_stage = 0};
  EXPECT_THAT(testing::failure_of_ranks(
                  2,
                  [&](comm::Communicator& ranks) {
                    auto part =
                        fully_shard(nn::Linear(3, 3), mesh, ranks, kWhole);
                    Schedule({{part, ranks.rank(), 2}}, ranks.world(),
                             {.replicas = &ranks.world()});
                  }),
              HasSubstr("Leave `replicas` out"));
  EXPECT_THAT(
      testing::failure_of_ranks(
          2,
          [&](comm::Communicator& ranks) {
            auto part = fully_shard(nn::Linear(3, 3), mesh, ranks, kWhole);
            Schedule({{part, ranks.rank(), 4},
                      {nn::Linear(3, 3), 2 + ranks.rank(), 4}},
                     ranks.world(),
                     {.schedule = "interleaved", .num_microbatches = 2});
          }),
      HasSubstr("some stages of this rank are sharded and some are not"));
  EXPECT_THAT(testing::failure_of_ranks(2,
                                        [&](comm::Communicator& ranks) {
                                          auto part =
                                              fully_shard(nn::Linear(3, 3),
                                                          mesh, ranks, kWhole);
                                          part.join([] {});
                                        }),
              HasSubstr("join() in a stage of a pipeline"));
  EXPECT_THAT(testing::failure_of_ranks(2,
                                        [&](comm::Communicator& ranks) {
                                          nn::Linear linear(4, 4);
                                          const auto tp = parallelize(
                                              *linear, DeviceMesh({.tp = 2}, 2),
                                              ranks,
                                              {{"", ParallelStyle::column()}});
                                        }),
              HasSubstr("names no"));
  EXPECT_THAT(testing::failure_of_ranks(
                  2,
                  [&](comm::Communicator& ranks) {
                    nn::Sequential net(nn::Linear(4, 4));
                    const auto tp =
                        parallelize(*net, DeviceMesh({.tp = 2}, 2), ranks,
                                    {{"0", ParallelStyle::column()}});
                    fully_shard(net, DeviceMesh({.dp_shard = 2}, 2), ranks);
                  }),
              HasSubstr("which are not those along tp of"));
}

// Modules that are parts by themselves count as such in a norm.
TEST(ShardedStages, ColumnParallelLinearCountsOnceInANorm) {
  const DeviceMesh mesh({.tp = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    nn::Sequential net(
        ColumnParallelLinear(nn::LinearOptions(4, 6), ranks.world()),
        RowParallelLinear(nn::LinearOptions(6, 4), ranks.world()));
    net->to(at::kDouble);  // gives them other memory
    auto model = fully_shard(net, mesh, ranks, {.zero_stage = 0});
    const at::Tensor x = numbers(4, 0.3);
    model.forward(x).square().sum().backward();
    at::Tensor parts = at::zeros({1}, at::kDouble), whole = parts.clone();
    for (const auto& item : net->named_parameters()) {
      const auto square =
          item.value().grad().to(at::kDouble).square().sum().view({1});
      (item.key() == "1.bias" ? whole : parts) += square;
    }
    ranks.world().all_reduce(parts).synchronize();
    EXPECT_NEAR(model.clip_grad_norm(1e9),
                (parts + whole).sqrt().item<double>(), 1e-9);
    EXPECT_EQ(model.shards()[0].shape, (std::vector<int64_t>{6, 4}));
  });
}

}  // namespace
}  // namespace tessera
