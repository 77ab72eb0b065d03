// What users do to a module that is wrapped: load, freeze, penalise, write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <sstream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/load.h"
#include "tessera/wrappers/moe.h"
#include "tessera/wrappers/parallelize.h"
#include "tests/support/failure_of.h"
#include "tests/support/small_net.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using tests::batch_of;
using tests::small_net;
using Values = std::vector<at::Tensor>;

Values values_of(const nn::Sequential& net) {
  Values values;
  for (const auto& p : net->parameters()) values.push_back(p.detach().clone());
  return values;
}

void expect_equal(const Values& found, const Values& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-10, 1e-12)) << i;
  }
}

at::Tensor loss_of(const at::Tensor& y) { return y.pow(2).mean(); }

// `steps` of SGD on one rank, from `net`.
Values trained(nn::Sequential net, int64_t steps,
               const std::function<at::Tensor()>& beside = nullptr) {
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net->forward(batch_of(step)));
    if (beside) loss = loss + beside();
    loss.backward();
    optimizer.step();
  }
  return values_of(net);
}

using Body = std::function<void(comm::Communicator&, nn::Sequential,
                                FullySharded<nn::Sequential>&)>;

// In every stage, on two ranks.
void sharded(const Body& body, FullyShardOptions options = {}) {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    if (stage == 0 && options.compute_dtype) continue;
    options.zero_stage = stage;
    const mesh::DeviceMesh mesh(stage == 0 ? mesh::Degrees{.dp_replicate = 2}
                                           : mesh::Degrees{.dp_shard = 2},
                                2);
    tests::on_ranks(2, [&](comm::Communicator& ranks, nn::Sequential net) {
      auto model = fully_shard(net, mesh, ranks, options);
      body(ranks, net, model);
    });
  }
}

void train(FullySharded<nn::Sequential>& model, nn::Sequential net,
           int64_t steps) {
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model.forward(batch_of(step))).backward();
    optimizer.step();
  }
}

// A module of other values, as torch::save() writes it.
nn::Sequential other_net() {
  auto other = small_net();
  const at::NoGradGuard no_grad;
  for (auto& p : other->parameters()) p.mul_(-1.5).add_(0.1);
  return other;
}

TEST(ModuleChanges, WhatIsLoadedWhileItIsGatheredIsTrained) {
  std::stringstream saved;
  torch::save(other_net(), saved);
  const TemporaryFolder folder("tessera-load");
  torch::save(other_net(), folder.file("net.pt"));
  const Values wanted = trained(other_net(), 3);
  for (const bool in_place : {false, true}) {
    sharded([&](comm::Communicator&, nn::Sequential net, auto& model) {
      {
        const auto whole = model.gather();
        std::istringstream in(saved.str());
        if (in_place) {
          load(*net, folder.file("net.pt"));
        } else {
          torch::load(net, in);
        }
      }
      train(model, net, 3);
      const auto whole = model.gather();
      expect_equal(values_of(net), wanted);
    });
  }
}

TEST(ModuleChanges, AnotherModulesFileIsRefusedAtTheNextForward) {
  sharded([&](comm::Communicator&, nn::Sequential net, auto& model) {
    {
      const auto whole = model.gather();
      net->parameters()[0].set_data(at::zeros({2, 2}, at::kDouble));
    }
    EXPECT_THAT(failure_of([&] { model.forward(batch_of(0)); }),
                HasSubstr("was given a tensor of [2, 2]"));
  });
}

TEST(ModuleChanges, APenaltyOnParametersIsAdded) {
  const auto wanted = [] {
    auto net = small_net();
    return trained(net, 3, [&] {
      auto sum = at::zeros({}, at::kDouble);
      for (const auto& p : net->parameters()) sum = sum + p.square().sum();
      return 0.01 * sum;
    });
  }();
  for (const bool before : {false, true}) {
    sharded([&](comm::Communicator&, nn::Sequential net, auto& model) {
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto penalty = [&] {
        auto sum = at::zeros({}, at::kDouble);
        for (const auto& p : net->parameters()) sum = sum + p.square().sum();
        return 0.01 * sum;
      };
      for (int64_t step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const at::Tensor first = before ? penalty() : at::Tensor();
        const auto loss = loss_of(model.forward(batch_of(step)));
        (loss + (before ? first : penalty())).backward();
        optimizer.step();
      }
      const auto whole = model.gather();
      expect_equal(values_of(net), wanted);
    });
  }
}

TEST(ModuleChanges, WhoJoinsHasNoGradientsOfItsLastStep) {
  const std::vector<int64_t> batches = {4, 2};
  const auto wanted = [&] {
    auto net = small_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const double active = step < 2 ? 2 : 1;
      for (int64_t rank = 0; rank < active; ++rank) {
        (loss_of(net->forward(batch_of(10 * rank + step))) / active).backward();
      }
      optimizer.step();
    }
    return values_of(net);
  }();
  for (const std::string place : {"first", "before backward", "behind step"}) {
    sharded([&](comm::Communicator& ranks, nn::Sequential net, auto& model) {
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int64_t step = 0; step < batches[ranks.rank()]; ++step) {
        if (place == "first") optimizer.zero_grad();
        const auto loss =
            loss_of(model.forward(batch_of(10 * ranks.rank() + step)));
        if (place == "before backward") optimizer.zero_grad();
        loss.backward();
        optimizer.step();
        if (place == "behind step") optimizer.zero_grad();
      }
      model.join([&] {
        optimizer.step();
        optimizer.zero_grad();
      });
      const auto whole = model.gather();
      expect_equal(values_of(net), wanted);
    });
  }
}

TEST(ModuleChanges, FreezingIsFollowed) {
  const auto wanted = [] {
    auto net = small_net();
    trained(net, 2);
    net->parameters()[0].requires_grad_(false);
    trained(net, 2);
    net->parameters()[0].requires_grad_(true);
    return trained(net, 2);
  }();
  for (const bool gathered : {false, true}) {
    sharded([&](comm::Communicator&, nn::Sequential net, auto& model) {
      const auto set = [&](bool trains) {
        if (gathered) {
          const auto whole = model.gather();
          net->parameters()[0].requires_grad_(trains);
        } else {
          net->parameters()[0].requires_grad_(trains);
        }
      };
      train(model, net, 2);
      set(false);
      train(model, net, 2);
      set(true);
      train(model, net, 2);
      const auto whole = model.gather();
      expect_equal(values_of(net), wanted);
    });
  }
}

TEST(ModuleChanges, WhatNobodyWouldReduceIsRefused) {
  tests::on_ranks(2, [](comm::Communicator& ranks, nn::Sequential net) {
    net->parameters()[0].requires_grad_(false);
    {
      DistributedDataParallel ddp(net, ranks.world());
      net->parameters()[0].requires_grad_(true);
      EXPECT_THAT(failure_of([&] { ddp.forward(batch_of(0)); }),
                  HasSubstr("0.weight requires a gradient, and did not"));
      net->parameters()[0].requires_grad_(false);
      net->push_back(nn::Linear(3, 3));
      EXPECT_THAT(failure_of([&] { ddp.forward(batch_of(0)); }),
                  HasSubstr("Register them all before"));
    }
    auto other = small_net();
    other->parameters()[0].requires_grad_(false);
    auto model =
        fully_shard(other, mesh::DeviceMesh({.dp_shard = 2}, 2), ranks);
    other->parameters()[0].requires_grad_(true);
    EXPECT_THAT(failure_of([&] { model.forward(batch_of(0)); }),
                HasSubstr("nobody would reduce it"));
  });
}

struct OddImpl : nn::Module {
  nn::Linear linear{nn::LinearOptions(5, 3)};
  bool reads_parameters = false, writes = false;
  OddImpl() {
    register_module("linear", linear);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (writes) {
      const at::NoGradGuard no_grad;
      linear->weight.clamp_(-0.5, 0.5);
    }
    const auto y = linear->forward(x);
    return reads_parameters ? y * parameters()[0].sum() : y;
  }
};
TORCH_MODULE(Odd);

TEST(ModuleChanges, AForwardThatComputesWithShardsIsRefused) {
  for (int64_t stage : {1, 2, 3}) {
    tests::on_ranks(2, [&](comm::Communicator& ranks, const nn::Sequential&) {
      Odd odd;
      auto model = fully_shard(odd, mesh::DeviceMesh({.dp_shard = 2}, 2), ranks,
                               {.zero_stage = stage});
      loss_of(model.forward(batch_of(0))).backward();
      odd->reads_parameters = true;
      EXPECT_THAT(failure_of([&] { model.forward(batch_of(0)); }),
                  HasSubstr("as parameters() has it, which is this rank's"));
    });
  }
}

// Where shards are no part of what is written to; else it is kept.
TEST(ModuleChanges, AWriteThatWouldBeLostIsRefused) {
  for (const int64_t stage : {1, 2, 3}) {
    for (const bool rounds : {false, true}) {
      SCOPED_TRACE(c10::str("stage ", stage, rounds ? ", rounded" : ""));
      tests::on_ranks(2, [&](comm::Communicator& ranks, const nn::Sequential&) {
        Odd odd;
        {
          const at::NoGradGuard no_grad;
          odd->linear->weight.fill_(2);
        }
        FullyShardOptions options{.zero_stage = stage};
        if (rounds) options.compute_dtype = at::kFloat;
        auto model = fully_shard(odd, mesh::DeviceMesh({.dp_shard = 2}, 2),
                                 ranks, options);
        odd->writes = true;
        const auto refused = failure_of([&] { model.forward(batch_of(0)); });
        if (stage == 3 || rounds) {
          EXPECT_THAT(refused, AllOf(HasSubstr("aten::clamp_"),
                                     HasSubstr("without compute_dtype")));
          return;
        }
        EXPECT_EQ(refused, "");
        const auto whole = model.gather();
        EXPECT_EQ(odd->parameters()[0].max().item<double>(), 0.5);
      });
    }
  }
}

// Rank 1, which goes on alone, is told no statistics of before.
TEST(ModuleChanges, TheNewestStatisticsOutliveAJoin) {
  constexpr int64_t kBatches = 4;
  const auto count_of = [](nn::BatchNorm1d& norm) {
    return norm->num_batches_tracked.item<int64_t>();
  };
  const auto batches_of = [](comm::Communicator& ranks) {
    return ranks.rank() == 0 ? 1 : kBatches;
  };
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const auto rows = at::arange(24).to(at::kFloat).view({4, 6});
    nn::BatchNorm1d norm(6);
    DistributedDataParallel ddp(norm, ranks.world());
    for (int64_t epoch = 1; epoch <= 2; ++epoch) {
      for (int64_t i = 0; i < batches_of(ranks); ++i) {
        ddp.backward(ddp.forward(rows).pow(3).sum());
      }
      ddp.join();
      EXPECT_EQ(count_of(norm), epoch * kBatches);
    }
    for (const int64_t stage : {1, 3}) {
      nn::BatchNorm1d own(6);
      auto model = fully_shard(own, mesh::DeviceMesh({.dp_shard = 2}, 2), ranks,
                               {.zero_stage = stage});
      for (int64_t epoch = 1; epoch <= 2; ++epoch) {
        for (int64_t i = 0; i < batches_of(ranks); ++i) {
          model.backward(model.forward(rows).pow(3).sum());
        }
        model.join([] {});
        EXPECT_EQ(count_of(own), epoch * kBatches) << "stage " << stage;
      }
    }
  });
}

// On rank 1: the mean over both, of which one gave zeros.
TEST(ModuleChanges, ALossThatRequiresNoGradientHangsNobody) {
  const auto wanted = [] {
    auto net = small_net();
    (2 * loss_of(net->forward(batch_of(0))) / 2).backward();
    Values found;
    for (const auto& p : net->parameters()) found.push_back(p.grad());
    return found;
  }();
  sharded([&](comm::Communicator& ranks, nn::Sequential net, auto& model) {
    const auto loss = [&] {
      const auto own = loss_of(model.forward(batch_of(0)));
      return ranks.rank() == 0 ? own : at::zeros({}, at::kDouble);
    };
    model.accumulate(loss());
    model.backward(loss());
    Values gradients;
    for (const auto& p : net->parameters()) {
      gradients.push_back(p.grad().clone());
    }
    {  // as values, which can be seen whole
      const at::NoGradGuard no_grad;
      const auto own = net->parameters();
      for (size_t i = 0; i < own.size(); ++i) own[i].copy_(gradients[i]);
    }
    const auto whole = model.gather();
    expect_equal(values_of(net), wanted);
  });
}

TEST(ModuleChanges, ANormOfZeroLeavesNoGradient) {
  sharded([&](comm::Communicator&, nn::Sequential net, auto& model) {
    loss_of(model.forward(batch_of(0))).backward();
    EXPECT_GT(model.clip_grad_norm(0), 0);
    EXPECT_EQ(model.clip_grad_norm(1), 0);
  });
}

// One that is unused in a step, beside one without elements, has no gradient.
struct EmptyImpl : nn::Module {
  at::Tensor nothing, odd, used;
  bool takes_odd = true;
  EmptyImpl() {
    nothing = register_parameter("nothing", at::empty({0, 4}, at::kDouble));
    odd = register_parameter("odd", at::ones({5}, at::kDouble));
    used = register_parameter("used", at::ones({5}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x * used + nothing.sum();
    return takes_odd ? y * odd : y;
  }
};
TORCH_MODULE(Empty);

TEST(ModuleChanges, AParameterWithoutElementsHasNoNeighbour) {
  for (int64_t stage : {1, 2, 3}) {
    tests::on_ranks(2, [&](comm::Communicator& ranks, const nn::Sequential&) {
      Empty net;
      auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 2}, 2), ranks,
                               {.zero_stage = stage});
      net->takes_odd = false;
      loss_of(model.forward(batch_of(0))).backward();
      EXPECT_FALSE(net->named_parameters()["odd"].grad().defined());
      EXPECT_TRUE(net->named_parameters()["used"].grad().defined());
    });
  }
}

TEST(ModuleChanges, WholeNumbersAreNotRounded) {
  struct Picks : nn::Module {
    at::Tensor places, weight;
    Picks() {
      places = register_parameter("places", at::tensor({4, 1, 257}),
                                  /*requires_grad=*/false);
      weight = register_parameter("weight", at::ones({300}, at::kDouble));
    }
    at::Tensor forward(const at::Tensor& x) {
      return x.sum() * weight.index_select(0, places);
    }
  };
  tests::on_ranks(2, [](comm::Communicator& ranks, const nn::Sequential&) {
    auto net = std::make_shared<Picks>();
    auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 2}, 2), ranks,
                             {.compute_dtype = at::kBFloat16});
    loss_of(model.forward(batch_of(0))).backward();
    const auto whole = model.gather();
    EXPECT_EQ(net->places[2].item<int64_t>(), 257);
  });
}

TEST(ModuleChanges, RanksThatJoinedDdpHaveTheNewestParameters) {
  std::vector<Values> found(3);
  tests::on_ranks(3, [&](comm::Communicator& ranks, nn::Sequential net) {
    DistributedDataParallel ddp(net, ranks.world());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      for (int64_t step = 0; step < 1 + (ranks.rank() + epoch) % 3; ++step) {
        ddp.backward(loss_of(ddp.forward(batch_of(step))));
        optimizer.step();
      }
      ddp.join();
    }
    found[ranks.rank()] = values_of(net);
  });
  expect_equal(found[1], found[0]);
  expect_equal(found[2], found[0]);
}

TEST(ModuleChanges, PartsOfAModuleAreNotTakenForTheSame) {
  const mesh::DeviceMesh by_experts({.dp_shard = 2, .ep = 2}, 2);
  const mesh::DeviceMesh by_tp({.tp = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    std::optional<MoE> moe;
    comm::in_turn(ranks.world(), [&] {
      moe.emplace(4, 4, 2, [] { return nn::Linear(4, 4); }, by_experts, ranks);
    });
    EXPECT_THAT(
        failure_of([&] { DistributedDataParallel(*moe, ranks.world()); }),
        HasSubstr("have other experts of the MoE \"\""));
    nn::Sequential net(nn::Linear(4, 4));
    const auto cut =
        parallelize(*net, by_tp, ranks, {{"0", ParallelStyle::column()}});
    EXPECT_THAT(
        failure_of([&] { DistributedDataParallel(net, ranks.world()); }),
        HasSubstr("have other shares of 0.weight"));
  });
}

TEST(ModuleChanges, SharesOfLayersAreUpdatedByEveryOptimizer) {
  const auto net_of = [] {
    nn::Sequential net(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 6));
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    double at = 0;
    for (auto& p : net->parameters()) {
      p.copy_(at::arange(p.numel(), at::kDouble).add(++at).sin().view_as(p));
    }
    return net;
  };
  const auto rows = at::arange(24, at::kDouble).mul(0.3).cos().view({4, 6});
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<at::Tensor>)>;
  const std::vector<std::pair<std::string, Make>> optimizers = {
      {"sgd",
       [](auto p) {
         return std::make_unique<torch::optim::SGD>(
             p, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
       }},
      {"rmsprop",
       [](auto p) {
         return std::make_unique<torch::optim::RMSprop>(
             p, torch::optim::RMSpropOptions(0.01).momentum(0.9));
       }},
      {"adagrad",
       [](auto p) { return std::make_unique<torch::optim::Adagrad>(p); }},
      {"adamw",
       [](auto p) { return std::make_unique<torch::optim::AdamW>(p); }}};
  for (const auto& [name, make] : optimizers) {
    const auto train_it = [&](nn::Sequential net) {
      const auto optimizer = make(net->parameters());
      for (int64_t step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        loss_of(net->forward(rows)).backward();
        optimizer->step();
      }
      const at::NoGradGuard no_grad;
      return net->forward(rows);
    };
    const auto wanted = train_it(net_of());
    comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
      auto net = net_of();
      const auto cut = parallelize(
          *net, mesh::DeviceMesh({.tp = 2}, 2), ranks,
          {{"0", ParallelStyle::column()}, {"2", ParallelStyle::row()}});
      EXPECT_TRUE(at::allclose(train_it(net), wanted, 1e-10, 1e-12)) << name;
    });
  }
}

TEST(Load, RefusesWhatDoesNotFitAndChangesNothing) {
  const TemporaryFolder folder("tessera-load");
  auto net = small_net();
  const Values before = values_of(net);
  nn::Sequential narrow(nn::Linear(5, 11), nn::Tanh(), nn::Linear(11, 2));
  narrow->to(at::kDouble);
  torch::save(narrow, folder.file("narrow.pt"));
  nn::Sequential shorter(nn::Linear(5, 11));
  torch::save(shorter, folder.file("shorter.pt"));
  const auto said = [&](const char* file) {
    return failure_of([&] { load(*net, folder.file(file)); });
  };
  EXPECT_THAT(said("narrow.pt"),
              HasSubstr("2.weight has [2, 11], and [3, 11]"));
  EXPECT_THAT(said("shorter.pt"), HasSubstr("holds nothing of 1"));
  EXPECT_THAT(said("none.pt"), HasSubstr("cannot be read"));
  expect_equal(values_of(net), before);
}

}  // namespace
}  // namespace tessera
