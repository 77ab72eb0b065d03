// An optimizer that averages gradients against one rank with the whole batch,
// in double: fusion, cycles, orders, accumulation, missing gradients, state.
#include "tessera/wrappers/distributed_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "tessera/core/error.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tests/support/failure_of.h"

namespace tessera {
namespace {

using comm::Communicator;
using testing::failure_of;
using ::testing::HasSubstr;
using Values = std::vector<at::Tensor>;

constexpr int64_t kBranches = 5;
constexpr int64_t kRows = 24;  // divides by 2, 3, 4 and again by 2
constexpr int kSteps = 6;

// Branches that are added up: backward reaches the one that ran last first.
struct BranchesImpl : torch::nn::Module {
  std::vector<torch::nn::Linear> branches;
  torch::nn::BatchNorm1d norm{nullptr};  // for its buffers

  explicit BranchesImpl(uint64_t seed = 1) {
    for (int64_t b = 0; b < kBranches; ++b) {
      branches.push_back(register_module("branch" + std::to_string(b),
                                         torch::nn::Linear(6, 2 + b)));
    }
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    to(at::kDouble);
    at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    for (auto& p : parameters()) p.normal_(0, 0.4, generator);
    for (auto& b : buffers()) b.fill_(static_cast<double>(seed));
  }
  // The branches from `first` on, around; `skipped` is left out.
  at::Tensor forward(const at::Tensor& x, int64_t first = 0,
                     int64_t skipped = -1) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int64_t i = 0; i < kBranches; ++i) {
      const int64_t b = (first + i) % kBranches;
      if (b == skipped) continue;
      loss = loss + at::tanh(branches[b]->forward(x)).pow(2).mean();
    }
    return loss;
  }
};
TORCH_MODULE(Branches);

at::Tensor batch_of(int step) {
  return (at::arange(kRows * 6, at::kDouble) + 7 * step)
      .mul(0.37)
      .sin()
      .view({kRows, 6});
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(Values)>;

std::unique_ptr<torch::optim::Optimizer> sgd(Values parameters) {
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::unique_ptr<torch::optim::Optimizer> adam(Values parameters) {
  return std::make_unique<torch::optim::Adam>(parameters,
                                              torch::optim::AdamOptions(1e-2));
}

Values values_of(torch::nn::Module& module) {
  Values values;
  for (auto& p : module.parameters()) values.push_back(p.detach().clone());
  return values;
}

double largest_difference(const Values& a, const Values& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    worst =
        std::max(worst, ((a[i] - b[i]).norm() / b[i].norm()).item<double>());
  }
  return worst;
}

// What one rank makes of the whole batch.
Values one_rank(const MakeOptimizer& make, int from = 0, int to = kSteps) {
  Branches net;
  const auto optimizer = make(net->parameters());
  for (int step = from; step < to; ++step) {
    optimizer->zero_grad();
    net->forward(batch_of(step)).backward();
    optimizer->step();
  }
  return values_of(*net);
}

// Rank r's share of the batch, from branch `first` on.
void run_step(Branches& net, DistributedOptimizer& optimizer,
              Communicator& ranks, int step, int64_t passes = 1,
              int64_t first = 0) {
  const int64_t rows = kRows / ranks.world_size() / passes;
  optimizer.zero_grad();
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t begin = (ranks.rank() * passes + pass) * rows;
    auto loss = net->forward(batch_of(step).narrow(0, begin, rows), first);
    (loss / static_cast<double>(passes)).backward();
  }
  optimizer.step();
}

void expect_one_rank(int64_t world, const MakeOptimizer& make,
                     const DistributedOptimizerOptions& options) {
  const Values expected = one_rank(make);
  comm::run_threads(world, "shm", [&](Communicator& ranks) {
    Branches net(/*seed=*/1 + ranks.rank());
    broadcast_parameters(*net, ranks.world());
    const auto inner = make(net->parameters());
    DistributedOptimizer optimizer(*inner, ranks, options);
    for (int step = 0; step < kSteps; ++step) {
      // Each rank meets the branches in another order, every step.
      run_step(net, optimizer, ranks, step, options.backward_passes_per_step,
               (step * ranks.rank()) % kBranches);
      ranks.world().barrier();  // a group of the user's, meanwhile
    }
    EXPECT_LT(largest_difference(values_of(*net), expected), 1e-10)
        << world << " ranks, fusion " << options.fusion_threshold << ", cycle "
        << options.cycle_time.count() << " ms, passes "
        << options.backward_passes_per_step;
  });
}

TEST(DistributedOptimizer, EqualsOneRankForEveryFusionAndCycle) {
  for (const MakeOptimizer& make : {MakeOptimizer(sgd), MakeOptimizer(adam)}) {
    for (int64_t world : {1, 2, 3, 4}) {
      for (int64_t threshold : {int64_t{0}, int64_t{300}, int64_t{64} << 20}) {
        for (int cycle_ms : {0, 2}) {
          expect_one_rank(world, make,
                          {.fusion_threshold = threshold,
                           .cycle_time = std::chrono::milliseconds(cycle_ms)});
        }
      }
    }
  }
}

TEST(DistributedOptimizer, AccumulatesOverBackwardPasses) {
  for (int64_t passes : {2, 3}) {
    expect_one_rank(2, adam, {.backward_passes_per_step = passes});
  }
}

TEST(DistributedOptimizer, SumsWhereAsked) {
  comm::run_threads(2, "shm", [&](Communicator& ranks) {
    Branches net;
    const auto inner = sgd(net->parameters());
    DistributedOptimizer optimizer(*inner, ranks, {.mean = false});
    net->forward(batch_of(0)).backward();
    optimizer.synchronize();
    Branches alone;
    alone->forward(batch_of(0)).backward();
    const auto& weight = net->branches[2]->weight;
    EXPECT_TRUE(
        at::allclose(weight.grad(), alone->branches[2]->weight.grad() * 2));
    optimizer.step();  // does not reduce again
    EXPECT_TRUE(
        at::allclose(weight.grad(), alone->branches[2]->weight.grad() * 2));
  });
}

TEST(DistributedOptimizer, FusesUpToTheThreshold) {
  for (auto [threshold, reductions] :
       {std::pair{int64_t{0}, 2 * kBranches}, {int64_t{64} << 20, 1}}) {
    comm::run_threads(2, "shm", [&](Communicator& ranks) {
      Branches net;
      const auto inner = sgd(net->parameters());
      // So long a cycle ends when all gradients are there.
      DistributedOptimizer optimizer(*inner, ranks,
                                     {.fusion_threshold = threshold,
                                      .cycle_time = std::chrono::minutes(1)});
      run_step(net, optimizer, ranks, 0);
      EXPECT_EQ(optimizer.num_reductions(), reductions);
    });
  }
}

// Branch r is left out on rank r; all lack those of the norm.
TEST(DistributedOptimizer, CountsAMissingGradientAsZero) {
  Branches whole;
  for (int64_t rank = 0; rank < 3; ++rank) {
    (whole->forward(batch_of(0), 0, rank) / 3).backward();
  }
  comm::run_threads(3, "shm", [&](Communicator& ranks) {
    Branches net;
    const auto inner = adam(net->parameters());
    DistributedOptimizer optimizer(*inner, ranks);
    net->forward(batch_of(0), 0, ranks.rank()).backward();
    optimizer.step();
    for (int64_t b = 0; b < kBranches; ++b) {
      EXPECT_TRUE(at::allclose(net->branches[b]->weight.grad(),
                               whole->branches[b]->weight.grad(), 1e-12));
    }
    EXPECT_FALSE(net->norm->weight.grad().defined());
    EXPECT_TRUE(at::equal(net->norm->weight, whole->norm->weight));
  });
}

// Rank 1 alone has resumed: the others take over its parameters, buffers,
// moments, numbers of steps and learning rate.
TEST(DistributedOptimizer, TakesOverTheStateOfTheRankThatResumed) {
  for (const MakeOptimizer& make : {MakeOptimizer(sgd), MakeOptimizer(adam)}) {
    const Values expected = one_rank(make);
    comm::run_threads(3, "shm", [&](Communicator& ranks) {
      const bool has_resumed = ranks.rank() == 1;
      Branches net(has_resumed ? 1 : 2);
      const auto inner = make(net->parameters());
      if (!has_resumed) inner->param_groups()[0].options().set_lr(0.7);
      for (int step = 0; step < 3 && has_resumed; ++step) {
        inner->zero_grad();
        net->forward(batch_of(step)).backward();
        inner->step();
      }
      broadcast_parameters(*net, ranks.world(), /*root=*/1);
      broadcast_optimizer_state(*inner, ranks.world(), /*root=*/1);
      DistributedOptimizer optimizer(*inner, ranks);
      for (int step = 3; step < kSteps; ++step) {
        run_step(net, optimizer, ranks, step);
      }
      EXPECT_LT(largest_difference(values_of(*net), expected), 1e-10);
      EXPECT_EQ(net->norm->running_var[0].item<double>(), 1);
    });
  }
}

TEST(DistributedOptimizer, TwoOfThemDoNotMeet) {
  comm::run_threads(2, "shm", [](Communicator& ranks) {
    Branches one(1), two(2);
    const auto first = sgd(one->parameters());
    const auto second = sgd(two->parameters());
    DistributedOptimizer a(*first, ranks), b(*second, ranks);
    // Both backwards are under way at once, in other orders.
    (ranks.rank() == 0 ? one : two)->forward(batch_of(0)).backward();
    (ranks.rank() == 0 ? two : one)->forward(batch_of(0)).backward();
    a.step();
    b.step();
    Branches alone(2);
    const auto inner = sgd(alone->parameters());
    alone->forward(batch_of(0)).backward();
    inner->step();
    EXPECT_LT(largest_difference(values_of(*two), values_of(*alone)), 1e-12);
  });
}

TEST(DistributedOptimizer, SomeRanksMayHaveMoreOfThem) {
  comm::run_threads(3, "shm", [](Communicator& ranks) {
    Branches net;
    const auto inner = sgd(net->parameters());
    const auto gradient = [&] {
      return net->branches[0]->weight.grad().clone();
    };
    const auto mean_of = [&](const std::vector<int64_t>& some) {
      DistributedOptimizer optimizer(*inner, ranks, {.ranks = some});
      optimizer.zero_grad();
      net->forward(batch_of(static_cast<int>(ranks.rank()))).backward();
      optimizer.synchronize();
      return gradient();
    };
    at::Tensor of_two;
    if (ranks.rank() < 2) of_two = mean_of({0, 1});
    const at::Tensor of_all = mean_of({});
    if (ranks.rank() == 2) return;
    net->zero_grad();
    net->forward(batch_of(2)).backward();
    EXPECT_TRUE(at::allclose(of_all * 3, of_two * 2 + gradient()));
  });
}

TEST(DistributedOptimizer, RefusesParametersThatAreNotOnTheCpu) {
  comm::run_threads(1, "shm", [](Communicator& ranks) {
    const auto inner = sgd({at::empty({2}, at::kMeta).requires_grad_()});
    EXPECT_THAT(
        failure_of([&] { const DistributedOptimizer o(*inner, ranks); }),
        HasSubstr("parameter 0 lies on meta"));
  });
}

// On every rank, before it would go on with a gradient of its own.
TEST(DistributedOptimizer, RefusesWhatIsTrainedOnlySince) {
  comm::run_threads(2, "shm", [](Communicator& ranks) {
    Branches net;
    auto& late = net->branches[1]->weight;
    late.requires_grad_(false);
    const auto inner = sgd(net->parameters());
    DistributedOptimizer optimizer(*inner, ranks);
    run_step(net, optimizer, ranks, 0);
    late.requires_grad_(true);
    EXPECT_THAT(failure_of([&] { run_step(net, optimizer, ranks, 1); }),
                HasSubstr("the optimizer's tensor 2 [3, 6]"));
    late.requires_grad_(false);
    optimizer.step();
    inner->add_param_group(Values{at::ones({5}).requires_grad_()});
    EXPECT_THAT(failure_of([&] { optimizer.step(); }), HasSubstr(" [5] "));
  });
}

// One gradient, however often an optimizer over net->parameters() has it.
TEST(DistributedOptimizer, AveragesATiedGradientOnce) {
  for (const int64_t threshold : {0, 1 << 20}) {
    comm::run_threads(2, "shm", [&](Communicator& ranks) {
      const auto weight = at::ones({3}, at::kDouble).requires_grad_();
      torch::optim::SGD inner(Values{weight, weight}, 0.1);
      DistributedOptimizer optimizer(
          inner, ranks, {.fusion_threshold = threshold, .mean = false});
      (weight.sum() * (1.0 + ranks.rank())).backward();
      optimizer.synchronize();
      EXPECT_TRUE(at::equal(weight.grad(), at::full({3}, 3.0, at::kDouble)));
      EXPECT_EQ(optimizer.num_reductions(), 1);
    });
  }
}

// Every rank would have the shards of the first.
TEST(DistributedOptimizer, ShardsAreNotBroadcast) {
  comm::run_threads(2, "shm", [](Communicator& ranks) {
    const mesh::DeviceMesh sharded({.dp_shard = 2}, 2);
    for (const int64_t stage : {0, 1, 2, 3}) {
      torch::nn::Linear net(4, 6);
      auto model = fully_shard(net, sharded, ranks, {.zero_stage = stage});
      const auto values = [&] {
        const auto whole = model.gather();
        return values_of(*net);
      };
      const Values before = values();
      const auto refused =
          failure_of([&] { broadcast_parameters(*net, ranks.world()); });
      EXPECT_EQ(refused.find("have other shards of \"\"") != std::string::npos,
                stage > 0)
          << refused;
      {
        const auto whole = model.gather();
        broadcast_parameters(*net, ranks.world());
      }
      if (stage > 0) {
        EXPECT_THAT(
            failure_of([&] { DistributedDataParallel(net, ranks.world()); }),
            HasSubstr("have other shards"));
      }
      const Values behind = values();
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(behind[i], before[i])) << stage;
      }
    }
  });
}

TEST(DistributedOptimizer, RefusesMoreBackwardPassesThanAnnounced) {
  comm::run_threads(1, "shm", [](Communicator& ranks) {
    Branches net;
    const auto inner = sgd(net->parameters());
    DistributedOptimizer optimizer(*inner, ranks);
    net->forward(batch_of(0)).backward();
    EXPECT_THAT(failure_of([&] { net->forward(batch_of(0)).backward(); }),
                HasSubstr("backward_passes_per_step is 1"));
  });
}

TEST(DistributedOptimizer, RefusesOtherParametersOnAnotherRank) {
  comm::run_threads(2, "shm", [](Communicator& ranks) {
    torch::nn::Linear net(4, 2 + ranks.rank());
    const auto inner = sgd(net->parameters());
    EXPECT_THAT(
        failure_of([&] { const DistributedOptimizer o(*inner, ranks); }),
        HasSubstr("or other names, shapes or dtypes"));
  });
}

TEST(DistributedOptimizer, APeerThatFailsHoldsNobodyUp) {
  EXPECT_EQ(failure_of([] {
              comm::run_threads(2, "shm", [](Communicator& ranks) {
                Branches net;
                const auto inner = sgd(net->parameters());
                DistributedOptimizer optimizer(*inner, ranks);
                net->forward(batch_of(0)).backward();
                TS_CHECK(ranks.rank() != 1, "boom");
                optimizer.step();
                optimizer.zero_grad();
                net->forward(batch_of(0)).backward();
                optimizer.step();
              });
            }),
            "[rank 1/2] boom");
}

}  // namespace
}  // namespace tessera
