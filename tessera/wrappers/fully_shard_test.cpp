// fully_shard against one rank, in double, for modules of several kinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/fully_shard.h"
#include "tests/support/own_modules.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using namespace tests;

// A module on `world` ranks of dp_shard.
void on_ranks(int64_t world,
              const std::function<void(comm::Communicator&,
                                       const mesh::DeviceMesh&)>& body) {
  const mesh::DeviceMesh mesh({.dp_shard = world}, world);
  comm::run_threads(world, "shm",
                    [&](comm::Communicator& ranks) { body(ranks, mesh); });
}

Net make_in_turn(comm::Communicator& ranks, const Kind& kind) {
  Net net;
  comm::in_turn(ranks.world(), [&] { net = make(kind); });
  return net;
}

Values whole_gradients(FullySharded<Net>& model) {
  // As values: whole parameters have no gradients.
  Values gradients;
  for (auto& shard : model.module()->parameters()) {
    gradients.push_back(shard.grad().defined() ? shard.grad().clone()
                                               : at::Tensor());
  }
  const at::NoGradGuard no_grad;
  size_t i = 0;
  for (auto& shard : model.module()->parameters()) {
    const at::Tensor& gradient = gradients[i++];
    if (shard.requires_grad()) {
      gradient.defined() ? shard.copy_(gradient) : shard.zero_();
    }
  }
  const auto whole = model.gather();
  return values_of(*model.module());
}

Values gradients_of(nn::Module& module) {
  Values gradients;
  for (auto& p : module.parameters()) {
    gradients.push_back(p.grad().defined() ? p.grad().clone()
                                           : at::zeros_like(p));
  }
  return gradients;
}

// One block after the other, as each rank is told.
struct BranchesImpl : NetImpl {
  nn::ModuleList branches;
  std::vector<int> taken;
  BranchesImpl() {
    register_module("branches", branches);
    for (int i = 0; i < 4; ++i) branches->push_back(nn::Linear(6, 6));
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (int i : taken) {
      h = h + at::tanh(branches[i]->as<nn::Linear>()->forward(h));
    }
    return h;
  }
};
const Kind kBranches{"branches",
                     [] { return std::make_shared<BranchesImpl>(); }};

void take(const Net& net, std::vector<int> taken) {
  std::dynamic_pointer_cast<BranchesImpl>(net)->taken = std::move(taken);
}

TEST(FullyShard, RanksMayLeaveOutUnits) {
  // The first step has no order that all ranks share; the last rank has the
  // last units alone; one that nobody takes has no gradient.
  const std::vector<std::vector<int>> taken = {{0, 1}, {0, 3}, {3}};
  const Net alone = make(kBranches);
  for (const auto& each : taken) {
    take(alone, each);
    (loss_of(alone->forward(alone->input(kRows))) / 3).backward();
  }
  const Values wanted = gradients_of(*alone);
  for (int64_t stage : {1, 2, 3}) {
    on_ranks(3, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
      const Net net = make_in_turn(ranks, kBranches);
      auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
      take(net, taken[ranks.rank()]);
      for (int step = 0; step < 3; ++step) {
        for (auto& p : net->parameters()) p.mutable_grad().reset();
        loss_of(model.forward(net->input(kRows))).backward();
      }
      for (const auto& item : net->named_parameters()) {
        EXPECT_EQ(item.value().grad().defined(),
                  item.key().find("branches.2") == std::string::npos);
      }
      const Values found = whole_gradients(model);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-10, 1e-13)) << i;
      }
    });
  }
}

TEST(FullyShard, OrdersMayChange) {
  const std::vector<std::vector<int>> orders = {
      {0, 1, 2, 3}, {3, 1, 0, 2}, {2, 2, 0, 0, 3}};
  for (int64_t stage : {1, 2, 3}) {
    on_ranks(2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
      const Net net = make_in_turn(ranks, kBranches);
      const Net alone = make_in_turn(ranks, kBranches);
      auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
      for (const auto& order : orders) {  // gradients add up
        take(net, order);
        take(alone, order);
        loss_of(model.forward(net->input(kRows))).backward();
        loss_of(alone->forward(alone->input(kRows))).backward();
      }
      expect_equal(whole_gradients(model), gradients_of(*alone), 1e-10);
    });
  }
}

TEST(FullyShard, TwoForwardsOneBackward) {
  for (const Kind& kind : kinds()) {
    for (int64_t stage : {1, 2, 3}) {
      SCOPED_TRACE(c10::str(kind.name, " stage ", stage));
      on_ranks(2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
        const Net net = make_in_turn(ranks, kind);
        const Net alone = make_in_turn(ranks, kind);
        auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
        const auto loss = [&](auto& of) {
          auto first = loss_of(of.forward(rows_of(net, 0)));
          {
            const at::NoGradGuard no_grad;
            of.forward(rows_of(net, 1));
          }
          return first + 2 * loss_of(of.forward(rows_of(net, 2)));
        };
        loss(model).backward();
        loss(*alone).backward();
        Values wanted = gradients_of(*alone);
        const Values found = whole_gradients(model);
        const auto all = alone->parameters();
        for (size_t i = 0; i < found.size(); ++i) {
          if (!all[i].requires_grad()) continue;
          EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-10, 1e-13)) << i;
        }
      });
    }
  }
}

// Ranks have 3, 1 and 2 batches; a step's mean is over those that have one.
TEST(FullyShard, RanksWhoseDataEndsJoin) {
  const std::vector<int> batches = {3, 1, 2};
  const Kind& kind = kind_of("gpt");
  const auto batch = [](const Net& net, int64_t rank, int step) {
    return rows_of(net, static_cast<int>(10 * rank) + step);
  };
  const Net alone = make(kind);
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    int64_t active = 0;
    for (int64_t rank = 0; rank < 3; ++rank) active += step < batches[rank];
    for (int64_t rank = 0; rank < 3; ++rank) {
      if (step >= batches[rank]) continue;
      (loss_of(alone->forward(batch(alone, rank, step))) / active).backward();
    }
    nn::utils::clip_grad_norm_(alone->parameters(), 0.05);
    sgd.step();
  }
  const Values wanted = values_of(*alone);
  for (int64_t stage : {1, 2, 3}) {
    on_ranks(3, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
      const Net net = make_in_turn(ranks, kind);
      auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
      torch::optim::SGD optimizer(net->parameters(),
                                  torch::optim::SGDOptions(0.1));
      const auto step_and_zero = [&] {
        optimizer.step();
        optimizer.zero_grad();
      };
      for (int step = 0; step < batches[ranks.rank()]; ++step) {
        loss_of(model.forward(batch(net, ranks.rank(), step))).backward();
        model.clip_grad_norm(0.05);
        step_and_zero();
      }
      model.join(step_and_zero);
      const auto whole = model.gather();
      expect_equal(values_of(*net), wanted, 1e-10);
    });
  }
}

int64_t bytes_of_whole(const Net& net) {
  // Members of the classes are the whole tensors.
  const auto gpt = std::dynamic_pointer_cast<OwnGptImpl>(net);
  const auto& block = *gpt->blocks[1]->as<OwnBlockImpl>();
  return static_cast<int64_t>(block.qkv->weight.storage().nbytes());
}

TEST(FullyShard, EvaluatesInInferenceMode) {
  for (int64_t stage : {1, 3}) {
    on_ranks(2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
      const Net net = make_in_turn(ranks, kind_of("gpt"));
      const Net alone = make_in_turn(ranks, kind_of("gpt"));
      auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
      for (int step = 0; step < 2; ++step) {
        const c10::InferenceMode guard;
        const auto found = model.forward(rows_of(net, step));
        EXPECT_TRUE(at::equal(found, alone->forward(rows_of(net, step))));
      }
      loss_of(model.forward(rows_of(net, 2))).backward();
      loss_of(alone->forward(rows_of(net, 2))).backward();
      expect_equal(whole_gradients(model), gradients_of(*alone), 1e-10);
    });
  }
}

TEST(FullyShard, FreesBehindForwardAndBackward) {
  on_ranks(2, [](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
    const Net net = make_in_turn(ranks, kind_of("gpt"));
    auto model = fully_shard(net, mesh, ranks);
    EXPECT_THAT(model.units(),
                ::testing::ElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_EQ(bytes_of_whole(net), 0);
    const auto loss = loss_of(model.forward(rows_of(net, 0)));
    EXPECT_EQ(bytes_of_whole(net), 0);
    loss.backward();
    EXPECT_EQ(bytes_of_whole(net), 0);
    int64_t shard = 0, whole = 0;
    for (const auto& p : net->parameters()) shard += p.numel();
    for (const auto& p : make_in_turn(ranks, kind_of("gpt"))->parameters()) {
      whole += p.numel();
    }
    EXPECT_NEAR(2 * shard, whole, 16);  // odd rows
  });
}

TEST(FullyShard, GatheredParametersAreKept) {
  for (const auto& [stage, rounds] : std::vector<std::pair<int64_t, bool>>{
           {1, false}, {2, false}, {3, false}, {1, true}, {3, true}}) {
    on_ranks(2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
      const Net net = make_in_turn(ranks, kind_of("mlp"));
      FullyShardOptions options{.zero_stage = stage};
      if (rounds) options.compute_dtype = at::kBFloat16;
      auto model = fully_shard(net, mesh, ranks, options);
      const Values wanted = values_of(*make_in_turn(ranks, kind_of("mlp")));
      {
        const auto whole = model.gather();
        expect_equal(values_of(*net), wanted, 0);
        const at::NoGradGuard no_grad;
        for (auto& p : net->parameters()) p.mul_(2);
      }
      const auto whole = model.gather();
      const Values found = values_of(*net);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], 2 * wanted[i]));
      }
    });
  }
}

// As torch::save and torch::load see a module: a full state dict.
TEST(FullyShard, IsSavedAndLoadedWhole) {
  on_ranks(2, [](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
    const Net net = make_in_turn(ranks, kind_of("cnn"));
    auto model = fully_shard(net, mesh, ranks);
    std::stringstream file;
    {
      const auto whole = model.gather();
      torch::save(net, file);
    }
    const Net alone = make_in_turn(ranks, kind_of("cnn"));
    const Values wanted = values_of(*alone);
    {
      const at::NoGradGuard no_grad;
      for (auto& p : alone->parameters()) p.zero_();
      for (auto& p : net->parameters()) p.zero_();
    }
    torch::serialize::InputArchive archive;
    const std::string text = file.str();
    archive.load_from(text.data(), text.size());
    alone->load(archive);
    expect_equal(values_of(*alone), wanted, 0);
    {
      const auto whole = model.gather();
      net->load(archive);
    }
    const auto whole = model.gather();
    expect_equal(values_of(*net), wanted, 0);
  });
}

// Parameters of several types in one module.
struct MixedImpl : NetImpl {
  nn::Linear wide{6, 5}, narrow{5, 4};
  MixedImpl() {
    register_module("wide", wide);
    register_module("narrow", narrow);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return narrow->forward(wide->forward(x).to(narrow->weight.dtype()));
  }
};

TEST(FullyShard, TypesMayDiffer) {
  on_ranks(2, [](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
    const auto of = [&] {
      std::shared_ptr<MixedImpl> net;
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(3);
        net = std::make_shared<MixedImpl>();
        net->wide->to(at::kDouble);
      });
      return net;
    };
    const Net net = of();
    const Net alone = of();
    auto model = fully_shard(net, mesh, ranks, {.units = {"wide", "narrow"}});
    loss_of(model.forward(net->input(kRows))).backward();
    loss_of(alone->forward(net->input(kRows))).backward();
    expect_equal(whole_gradients(model), gradients_of(*alone), 1e-6);
    EXPECT_EQ(net->parameters()[0].scalar_type(), at::kDouble);
    EXPECT_EQ(net->parameters()[2].grad().scalar_type(), at::kFloat);
  });
}

TEST(FullyShard, ProductsOfFp32GoAnotherWay) {
  for (const char* name : {"wide", "heavy"}) {
    const Kind& kind = kind_of(name);
    const auto gradients_after = [&](Net& net, const auto& backward) {
      for (int64_t m = 0; m < 2; ++m) {
        const at::Tensor rows = rows_of(net, m).to(at::kFloat);
        backward(rows, /*is_last=*/m == 1);
      }
    };
    Net alone = make(kind, 1, at::kFloat);
    gradients_after(alone, [&](const at::Tensor& rows, bool) {
      loss_of(alone->forward(rows)).backward();
    });
    Values wanted;
    for (auto& p : alone->parameters()) wanted.push_back(p.grad().clone());
    for (const int64_t stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(c10::str(kind.name, " stage ", stage));
      on_ranks(2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
        Net net;
        comm::in_turn(ranks.world(), [&] { net = make(kind, 1, at::kFloat); });
        auto model = fully_shard(net, mesh, ranks, {.zero_stage = stage});
        gradients_after(net, [&](const at::Tensor& rows, bool is_last) {
          const at::Tensor loss =
              loss_of(model.forward(rows.narrow(0, ranks.rank() * 6, 6)));
          is_last ? loss.backward() : model.accumulate(loss);
        });
        {
          const c10::InferenceMode inference;
          const at::Tensor rows = rows_of(net, 0).to(at::kFloat);
          expect_equal({model.forward(rows)}, {alone->forward(rows)}, 1e-5);
        }
        expect_equal(whole_gradients(model), wanted, 1e-5);
      });
    }
  }
}

// Rounded as it would be by hand: weights and inputs to bf16, masters in fp32.
void expect_wide_masters(const Kind& kind) {
  const auto in_float = [&] {
    Net net = make(kind);
    net->to(at::kFloat);
    return net;
  };
  const Net master = in_float();
  torch::optim::AdamW optimizer(master->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    Net rounded = in_float();
    const at::NoGradGuard no_grad;
    const auto all = rounded->parameters(), wide = master->parameters();
    for (size_t i = 0; i < all.size(); ++i) all[i].copy_(wide[i]);
    rounded->to(at::kBFloat16);
    {
      const at::AutoGradMode grad(true);
      const at::Tensor rows = rows_of(master, step);
      loss_of(rounded->forward(rows.is_floating_point() ? rows.to(at::kBFloat16)
                                                        : rows))
          .backward();
    }
    const auto low = rounded->parameters();
    for (size_t i = 0; i < all.size(); ++i) {
      wide[i].mutable_grad() = low[i].grad().to(at::kFloat);
    }
    optimizer.step();
  }
  const Values wanted = values_of(*master);
  for (int64_t world : {1, 2}) {
    for (int64_t stage : {1, 2, 3}) {
      SCOPED_TRACE(c10::str("stage ", stage, " on ", world));
      on_ranks(world,
               [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
                 Net net;
                 comm::in_turn(ranks.world(), [&] { net = in_float(); });
                 auto model = fully_shard(
                     net, mesh, ranks,
                     {.zero_stage = stage, .compute_dtype = at::kBFloat16});
                 torch::optim::AdamW mine(net->parameters(),
                                          torch::optim::AdamWOptions(1e-2));
                 for (int step = 0; step < kSteps; ++step) {
                   mine.zero_grad();
                   // The whole batch on every rank: rounding is the same.
                   loss_of(model.forward(rows_of(net, step))).backward();
                   mine.step();
                 }
                 for (const auto& p : net->parameters()) {
                   EXPECT_EQ(p.scalar_type(), at::kFloat);
                   EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
                 }
                 const auto whole = model.gather();
                 const Values found = values_of(*net);
                 expect_equal(found, wanted, 0.0);
               });
    }
  }
}

std::string error_on(int64_t world,
                     const std::function<void(comm::Communicator&,
                                              const mesh::DeviceMesh&)>& body) {
  try {
    on_ranks(world, body);
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

// By LibTorch alone: what goes through fp32 (nn/matmul.h) is not rounded before
// it is added to a master's gradient, as it is by hand.
TEST(FullyShard, MastersStayWide) {
  at::globalContext().setUserEnabledMkldnn(false);
  for (const char* name : {"gpt", "lstm", "wide"}) {
    SCOPED_TRACE(name);
    expect_wide_masters(kind_of(name));
  }
  at::globalContext().setUserEnabledMkldnn(true);
}

// A glob of units stops at dots: what a block is made of is no unit by itself.
TEST(FullyShard, AGlobNamesOneLevel) {
  on_ranks(1, [](auto& ranks, const mesh::DeviceMesh& mesh) {
    const auto make = [] {
      return nn::ModuleList(nn::ModuleList(nn::Linear(2, 3), nn::Linear(3, 2)),
                            nn::Linear(2, 2));
    };
    const auto net = make(), other = make();
    auto model = fully_shard(net, mesh, ranks, {.units = {"*"}});
    EXPECT_EQ(model.units(), (std::vector<std::string>{"", "0", "1"}));
    auto inner = fully_shard(other, mesh, ranks, {.units = {"*.*"}});
    EXPECT_EQ(inner.units(), (std::vector<std::string>{"", "0.0", "0.1"}));
  });
}

TEST(FullyShard, RefusesWhatWouldBeWrong) {
  using ::testing::HasSubstr;
  const auto error_of =
      [](const std::function<void(FullySharded<Net>&, const Net&, int64_t)>&
             use,
         const FullyShardOptions& options = {}) {
        return error_on(
            2, [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
              const Net net = make_in_turn(ranks, kind_of("gpt"));
              torch::optim::SGD before(net->parameters(),
                                       torch::optim::SGDOptions(0.1));
              auto model = fully_shard(net, mesh, ranks, options);
              use(model, net, ranks.rank());
            });
      };
  const auto nothing = [](auto&, auto&, int64_t) {};
  EXPECT_THAT(error_of(nothing, {.zero_stage = 4}),
              HasSubstr("zero_stage is 4; 1, 2 and 3 shard, 0 does not"));
  EXPECT_THAT(
      error_of(nothing, {.zero_stage = 0, .compute_dtype = at::kBFloat16}),
      HasSubstr("compute_dtype with zero_stage 0"));
  EXPECT_THAT(error_of(nothing, {.units = {"block.*"}}),
              HasSubstr("\"block.*\" names no child module that has "
                        "parameters; the nearest is \"blocks"));
  EXPECT_THAT(
      error_of([](auto&, const Net& net, int64_t) {
        at::sum(std::dynamic_pointer_cast<OwnGptImpl>(net)->tokens->weight);
      }),
      HasSubstr("parameters of the module itself are used outside of "
                "forward() and backward"));
  EXPECT_THAT(error_of([](auto& model, const Net& net, int64_t rank) {
                const auto loss = loss_of(model.forward(rows_of(net, 0)));
                if (rank == 0) loss.backward();
                if (rank == 1) model.forward(rows_of(net, 0));
              }),
              HasSubstr("rank 0 is at backward, rank 1 at forward()"));
  EXPECT_THAT(error_of([](auto& model, const Net& net, int64_t) {
                const auto whole = model.gather();
                model.forward(rows_of(net, 0));
              }),
              HasSubstr("forward() while gather()'s result lives"));
  EXPECT_THAT(
      error_on(2,
               [](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
                 const Net net = make_in_turn(ranks, kinds()[ranks.rank()]);
                 fully_shard(net, mesh, ranks);
               }),
      HasSubstr("Build the same module on every rank"));
  EXPECT_THAT(
      error_on(2,
               [](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
                 nn::ParameterList list;
                 list->append(torch::ones({2}));
                 fully_shard(nn::ModuleList(list), mesh, ranks);
               }),
      HasSubstr("reads its own parameters() in forward"));
}

TEST(FullyShard, AnOptimizerMadeBeforeIsRefused) {
  for (int64_t stage : {1, 2, 3}) {
    EXPECT_THAT(
        error_on(2,
                 [&](comm::Communicator& ranks, const mesh::DeviceMesh& mesh) {
                   const Net net = make_in_turn(ranks, kind_of("gpt"));
                   torch::optim::SGD before(net->parameters(),
                                            torch::optim::SGDOptions(0.1));
                   auto model =
                       fully_shard(net, mesh, ranks, {.zero_stage = stage});
                   loss_of(model.forward(rows_of(net, 0))).backward();
                   before.step();
                 }),
        ::testing::HasSubstr("made before fully_shard()"));
  }
}

}  // namespace
}  // namespace tessera
