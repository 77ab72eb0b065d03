#include "tessera/wrappers/recompute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/failure_of.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using wrappers::shards_of;

// What was kept of the last forward's hidden activations, and how often it ran.
struct BlockImpl : nn::Module {
  nn::Linear up{6, 24}, down{24, 6};
  bool recomputes;
  double drops;
  int64_t forwards = 0;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> hidden;

  explicit BlockImpl(bool again, double drop = 0)
      : recomputes(again), drops(drop) {
    register_module("up", up);
    register_module("down", down);
    to(at::kDouble);
  }
  at::Tensor part(const at::Tensor& x) {
    ++forwards;
    const auto h = at::tanh(up->forward(x));
    hidden = h.storage().getWeakStorageImpl();
    return x + at::dropout(down->forward(h), drops, is_training());
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!recomputes) return part(x);
    return recompute([this](const at::Tensor& each) { return part(each); }, x);
  }
};
TORCH_MODULE(Block);

nn::Sequential make_net(bool again, double drop = 0) {
  torch::manual_seed(2);
  return nn::Sequential(Block(again, drop), Block(again, drop),
                        Block(again, drop));
}

at::Tensor batch() {
  return at::arange(72, at::kDouble).mul(0.3).sin().view({12, 6});
}
at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

using Gradients = std::map<std::string, at::Tensor>;
Gradients gradients_of(const nn::Module& module) {
  Gradients found;
  for (const auto& each : module.named_parameters()) {
    found[each.key()] = each.value().grad().clone();
  }
  return found;
}

void expect_alike(const Gradients& found, const Gradients& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, gradient] : found) {
    EXPECT_TRUE(at::allclose(gradient, wanted.at(name), 1e-10, 1e-13)) << name;
  }
}

const Gradients& kept_all() {
  static const Gradients gradients = [] {
    auto net = make_net(/*again=*/false);
    loss_of(net->forward(batch())).backward();
    return gradients_of(*net);
  }();
  return gradients;
}

TEST(Recompute, KeepsNothingAndGivesTheSameGradients) {
  for (const bool input_trains : {false, true}) {
    auto net = make_net(/*again=*/true);
    const auto x = batch().requires_grad_(input_trains);
    const auto loss = loss_of(net->forward(x));
    for (const auto& block : *net) {
      EXPECT_TRUE(block.get<BlockImpl>().hidden->expired());
      EXPECT_EQ(block.get<BlockImpl>().forwards, 1);
    }
    loss.backward();
    for (const auto& block : *net) {
      EXPECT_EQ(block.get<BlockImpl>().forwards, 2);
    }
    expect_alike(gradients_of(*net), kept_all());
    EXPECT_EQ(x.grad().defined(), input_trains);
  }
}

// And random numbers behind it go on as they would have.
TEST(Recompute, DropsTheSameAgain) {
  std::vector<Gradients> found;
  std::vector<at::Tensor> behind;
  for (const bool again : {false, true}) {
    auto net = make_net(again, /*drop=*/0.5);
    torch::manual_seed(9);
    const auto loss = loss_of(net->forward(batch()));
    at::rand({3});
    loss.backward();
    found.push_back(gradients_of(*net));
    behind.push_back(at::rand({3}));
  }
  expect_alike(found[1], found[0]);
  EXPECT_TRUE(at::equal(behind[1], behind[0]));
}

TEST(Recompute, SeveralTensorsAndNoGradient) {
  nn::Linear linear(6, 6);
  linear->to(at::kDouble);
  const auto part = [&](const at::Tensor& x, const at::Tensor& rows) {
    return std::tuple(linear->forward(x).index_select(0, rows), rows + 1, x);
  };
  const auto x = batch().requires_grad_();
  const auto rows = at::arange(11, -1, -1);
  const auto run = [&](const auto& forward) {
    linear->zero_grad();
    x.mutable_grad() = at::Tensor();
    const auto [y, next, same] = forward();
    EXPECT_TRUE(at::equal(next, rows + 1));
    (loss_of(y) + same.sum()).backward();
    return std::vector{linear->weight.grad().clone(), x.grad().clone()};
  };
  const auto wanted = run([&] { return part(x, rows); });
  const auto found = run([&] { return recompute(part, x, rows); });
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12, 1e-14)) << i;
  }
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(std::get<0>(recompute(part, x, rows)).requires_grad());
}

TEST(Recompute, ArgumentsMayBeUndefined) {
  nn::Linear linear(6, 6);
  linear->to(at::kDouble);
  const auto part = [&](const at::Tensor& x, const at::Tensor& mask) {
    const auto y = linear->forward(x);
    return mask.defined() ? y * mask : y;
  };
  loss_of(recompute(part, batch(), at::Tensor())).backward();
  const auto found = linear->weight.grad().clone();
  linear->zero_grad();
  loss_of(part(batch(), {})).backward();
  EXPECT_TRUE(at::allclose(found, linear->weight.grad(), 1e-12, 1e-14));
}

// What parallelize() has cut is computed again as it was.
TEST(Recompute, WithTensorParallelism) {
  const mesh::DeviceMesh mesh({.tp = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = make_net(/*again=*/true); });
    const auto tp = parallelize(
        *net, mesh, ranks,
        {{"*.up", ParallelStyle::column()}, {"*.down", ParallelStyle::row()}});
    loss_of(net->forward(batch())).backward();
    for (const auto& each : shards_of(*net)) {
      at::Tensor wanted = kept_all().at(each.name);
      for (size_t dim = 0; dim < each.box.size.size(); ++dim) {
        wanted = wanted.narrow(static_cast<int64_t>(dim), each.box.offset[dim],
                               each.box.size[dim]);
      }
      EXPECT_TRUE(at::allclose(each.parameter.grad(), wanted, 1e-10, 1e-13))
          << each.name;
    }
  });
}

// Layers as cut by tp, each behind a norm of this rank's part of a sequence.
struct NormedImpl : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({6})};
  nn::Linear up{6, 8}, down{8, 6};
  NormedImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double at = 0;
    for (auto& p : parameters()) {
      p.copy_(at::arange(p.numel(), at::kDouble).add(++at).sin().view_as(p));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::tanh(up->forward(norm->forward(x))));
  }
};
TORCH_MODULE(Normed);

// The input of a part that is computed again is a leaf, and so is a user's: the
// norm's parameters alone are summed over the ranks.
TEST(Recompute, WithNormsBySequence) {
  const auto rows = batch().view({3, 4, 6});
  Normed alone;
  const auto whole = rows.clone().requires_grad_();
  alone->forward(alone->forward(whole)).square().sum().backward();
  const auto wanted = gradients_of(*alone);
  for (const bool again : {false, true}) {
    comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
      Normed net;
      const auto tp = parallelize(
          *net, mesh::DeviceMesh({.tp = 2}, 2), ranks,
          {{"norm", ParallelStyle::sequence()},
           {"up", ParallelStyle::column(Lies::kBySequence)},
           {"down", ParallelStyle::row(Lies::kByFeatures, Lies::kBySequence)}});
      const auto x = rows.chunk(2, 1)[ranks.rank()].clone().requires_grad_();
      const auto part = [&](const at::Tensor& h) { return net->forward(h); };
      const auto y =
          again ? recompute(part, recompute(part, x)) : part(part(x));
      y.square().sum().backward();
      EXPECT_TRUE(at::allclose(x.grad(), whole.grad().chunk(2, 1)[ranks.rank()],
                               1e-10, 1e-13))
          << again;
      for (const auto* name : {"norm.weight", "norm.bias"}) {
        EXPECT_TRUE(at::allclose(net->named_parameters()[name].grad(),
                                 wanted.at(name), 1e-10, 1e-13))
            << name << " " << again;
      }
    });
  }
}

void on_ranks(
    int64_t world,
    const std::function<void(comm::Communicator&, nn::Sequential)>& body) {
  comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
    nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = make_net(/*again=*/true); });
    body(ranks, net);
  });
}

TEST(Recompute, InEveryStageOfZero) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    for (const bool own : {true, false}) {
      SCOPED_TRACE(c10::str("stage ", stage, own ? "" : ", the model's"));
      on_ranks(2, [&](comm::Communicator& ranks, nn::Sequential net) {
        auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 2}, 2),
                                 ranks, {.zero_stage = stage});
        for (int step = 0; step < 2; ++step) {
          const auto loss =
              loss_of(model.forward(batch().chunk(2)[ranks.rank()]));
          net->zero_grad();
          own ? loss.backward() : model.backward(loss);
          for (const auto& shard : model.shards()) {
            const at::Tensor wanted =
                kept_all()
                    .at(shard.name)
                    .narrow(0, shard.box.offset[0], shard.box.size[0]);
            EXPECT_TRUE(
                at::allclose(shard.parameter.grad(), wanted, 1e-10, 1e-13))
                << shard.name;
          }
        }
      });
    }
  }
}

// Each time a gradient of its own comes to it, from a backward of its own.
TEST(Recompute, APartTwiceUnderDataParallelism) {
  const auto net_in_turn = [](comm::Communicator& ranks) {
    Block net{nullptr};
    comm::in_turn(ranks.world(), [&] {
      torch::manual_seed(2);
      net = Block(/*again=*/true);
    });
    return net;
  };
  torch::manual_seed(2);
  Block alone(/*again=*/false);
  loss_of(alone->forward(alone->forward(batch()))).backward();
  const auto wanted = gradients_of(*alone);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const auto mine = batch().chunk(2)[ranks.rank()];
    for (const bool overlap : {true, false}) {
      Block net = net_in_turn(ranks);
      DistributedDataParallel model(net, ranks.world(), {.overlap = overlap});
      const auto train = [&] {
        model.backward(loss_of(net->forward(model.forward(mine))));
      };
      if (overlap) {
        EXPECT_THAT(testing::failure_of(train),
                    ::testing::HasSubstr("Set overlap to false"));
        ranks.world().barrier();  // both are behind what they had begun
        continue;
      }
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        train();
        expect_alike(gradients_of(*net), wanted);
      }
    }
  });
}

TEST(Recompute, DataParallelAndPipelines) {
  on_ranks(2, [&](comm::Communicator& ranks, nn::Sequential net) {
    DistributedDataParallel model(net, ranks.world());
    model.backward(loss_of(model.forward(batch().chunk(2)[ranks.rank()])));
    expect_alike(gradients_of(*net), kept_all());
  });
  for (const std::string schedule : {"1f1b", "zb_h1"}) {
    on_ranks(3, [&](comm::Communicator& ranks, nn::Sequential net) {
      Pipe pipe(net, ranks.world(),
                {.schedule = schedule,
                 .num_microbatches = 4,
                 .loss = [](const at::Tensor& y, const at::Tensor&) {
                   return loss_of(y);
                 }});
      pipe.step(batch(), batch());
      for (const auto& [name, gradient] : gradients_of(*pipe.parts()[0])) {
        EXPECT_TRUE(at::allclose(gradient, kept_all().at(name), 1e-10, 1e-13))
            << schedule << " " << name;
      }
    });
  }
}

}  // namespace
}  // namespace tessera
