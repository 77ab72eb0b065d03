// What initialize() updates by, beside the trainer's optimizer over the same
// module, whole on one rank, in double.
#include "tessera/module_engine/detail/module_updates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <tuple>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/mesh/slice.h"
#include "tessera/module_engine/initialize.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/wrappers/moe.h"
#include "tests/support/small_net.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using tests::batch_of;
using tests::expect_equal;
using tests::loss_of;
using tests::on_ranks;
using tests::small_net;
using tests::Values;
using tests::values_of;

constexpr int64_t kUpdates = 5;
constexpr double kLr = 0.01;

struct Kind {
  const char* name;
  const char* optimizer;  // DeepSpeed's
  InitializeOptions options;
};

std::string json_of(const Kind& kind, int64_t stage,
                    const std::string& more = "") {
  return c10::str(R"({"train_batch_size": 12, "gradient_clipping": 0.5,
  "optimizer": )",
                  kind.optimizer, more, R"(, "zero_optimization": {"stage": )",
                  stage, "}}");
}

constexpr const char* kAdamW =
    R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}})";
constexpr const char* kMuon = R"({"type": "Muon", "params": {"lr": 0.01,
    "momentum": 0.9, "weight_decay": 0.1}})";
constexpr const char* kGroups =
    R"([{"match": ["*.bias"], "weight_decay": 0},
        {"match": "2.*", "lr": 0.03, "betas": [0.8, 0.9]}])";

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"groups", kAdamW, {.settings = {{"optimizer.groups", kGroups}}}},
      {"average",
       kAdamW,
       {.settings = {{"optimizer.ema", "0.9"},
                     {"optimizer.normalize_grad", "true"}}}},
      {"narrow states",
       kAdamW,
       {.settings = {{"optimizer.state_dtype", "bf16"}}}},
      {"muon",
       kMuon,
       {.settings = {{"optimizer.groups", kGroups},
                     {"optimizer.muon.adamw_lr", "0.002"},
                     {"optimizer.ema", "0.9"}}}},
      {"muon in bf16",
       kMuon,
       {.settings = {{"optimizer.muon.dtype", "bf16"}}}}};
  return all;
}

struct Trained {
  Values parameters, averages;
};

Trained by_the_trainers_optimizer(const Kind& kind) {
  const auto config = detail::module_settings(json_of(kind, 0), 1, kind.options)
                          .config.optimizer;
  auto net = small_net();
  std::vector<optim::FlatSegment> segments;
  for (const auto& each : net->named_parameters()) {
    segments.push_back({.name = each.key(),
                        .parameter = each.value(),
                        .gradient = {},
                        .decay = true,
                        .is_matrix = each.value().dim() == 2});
  }
  const auto optimizer = optim::make_optimizer(config, segments);
  const optim::GradientScaling scaling{config.clip_norm, config.normalize_grad};
  for (int64_t update = 0; update < kUpdates; ++update) {
    net->zero_grad();
    loss_of(net->forward(batch_of(update))).backward();
    Values gradients;
    for (auto& p : net->parameters()) gradients.push_back(p.grad());
    const double norm =
        std::sqrt(optim::sum_of_squares(gradients).item<double>());
    optimizer->begin_step(scaling.of(norm));
    optimizer->step(kLr, 0, segments.size());
  }
  Trained trained{values_of(*net), {}};
  if (config.ema == 0) return trained;
  optimizer->swap_averages();
  trained.averages = values_of(*net);
  return trained;
}

// Updates [first, last) of this rank's share.
template <typename Engine>
void train(Engine& engine, int64_t first, int64_t last) {
  const int64_t micro = engine.train_micro_batch_size_per_gpu();
  for (int64_t update = first; update < last; ++update) {
    const at::Tensor mine =
        batch_of(update).narrow(0, engine.rank() * micro, micro);
    engine.backward(loss_of(engine.forward(mine)));
    engine.step();
  }
}

template <typename Engine>
void expect_trained(Engine& engine, const Trained& wanted) {
  const at::NoGradGuard no_grad;
  const auto expect = [&](const Values& values) {
    const auto whole = engine.gather();
    expect_equal(values_of(*engine.module()), values, 1e-10);
  };
  if (!wanted.averages.empty()) {
    const auto averages = engine.averaged();
    const at::Tensor out = engine.forward(batch_of(9));
    expect(wanted.averages);
    const auto whole = engine.gather();
    EXPECT_TRUE(at::allclose(out, engine.module()->forward(batch_of(9))));
  }
  expect(wanted.parameters);
}

TEST(ModuleUpdates, AreThoseOfTheTrainersOptimizer) {
  for (const Kind& kind : kinds()) {
    const Trained wanted = by_the_trainers_optimizer(kind);
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (const int64_t world : {1, 2, 3, 4}) {
        SCOPED_TRACE(c10::str(kind.name, " stage ", stage, " ranks ", world));
        on_ranks(world, [&](auto& ranks, auto net) {
          auto engine =
              initialize(net, json_of(kind, stage), ranks, kind.options);
          train(engine, 0, kUpdates);
          expect_trained(engine, wanted);
        });
      }
    }
  }
}

TEST(ModuleUpdates, GoOnFromACheckpointOfOtherRanks) {
  const TemporaryFolder made;
  const auto& folder = made.path();
  for (const Kind& kind : kinds()) {
    std::filesystem::remove_all(folder);
    on_ranks(2, [&](auto& ranks, auto net) {
      auto engine = initialize(net, json_of(kind, 3), ranks, kind.options);
      train(engine, 0, 3);
      engine.save_checkpoint(folder);
    });
    const Trained wanted = by_the_trainers_optimizer(kind);
    on_ranks(3, [&](auto& ranks, auto net) {
      auto engine = initialize(net, json_of(kind, 1), ranks, kind.options);
      engine.load_checkpoint(folder);
      train(engine, 3, kUpdates);
      expect_trained(engine, wanted);
    });
    if (wanted.averages.empty()) continue;
    on_ranks(1, [&](auto& ranks, auto net) {
      InitializeOptions without = kind.options;
      std::erase_if(without.settings, [](const auto& each) {
        return each.first == "optimizer.ema";
      });
      auto engine = initialize(net, json_of(kind, 1), ranks, without);
      try {
        engine.load_checkpoint(folder);
        FAIL();
      } catch (const Error& error) {
        EXPECT_THAT(message_of(error),
                    HasSubstr("step-3 holds other states than this engine "
                              "keeps: optimizer.ema is 0.9 in it and 0.0"));
      }
    });
  }
}

// What computes in bf16 has its matrices orthogonalised in it, over masters.
TEST(ModuleUpdates, OrthogonaliseInWhatIsComputedIn) {
  const Kind& kind = kinds()[3];
  const std::string json = json_of(kind, 2, R"(, "bf16": {"enabled": true})");
  on_ranks(
      2,
      [&](auto& ranks, auto net) {
        const Values before = values_of(*net);
        auto engine = initialize(net, json, ranks, kind.options);
        const auto mine = batch_of(0).narrow(0, 6 * ranks.rank(), 6);
        engine.backward(loss_of(engine.forward(mine.to(at::kFloat))));
        engine.step();
        const auto whole = engine.gather();
        const at::Tensor after = values_of(*net)[0];
        EXPECT_EQ(after.scalar_type(), at::kFloat);
        // Its step was 0.01 sqrt(11 / 5) times numbers of bf16.
        const at::Tensor moved =
            (before[0].to(at::kDouble) * (1 - 0.01 * 0.1) - after) /
            (0.01 * std::sqrt(11.0 / 5));
        EXPECT_GT(moved.norm().item<double>(), 0.6);
        EXPECT_LT(moved.norm().item<double>(), 3.4);
        const at::Tensor rounded = moved.to(at::kBFloat16).to(at::kDouble);
        EXPECT_LT((moved - rounded).abs().max().item<double>(), 3e-5);
      },
      at::kFloat);
}

// Each expert is a matrix by itself, on however many ranks it lies.
TEST(ModuleUpdates, OfExpertsWithMuon) {
  const Kind kind{"experts",
                  kMuon,
                  {.settings = {{"optimizer.groups",
                                 R"([{"match": "experts.3.*", "lr": 0.03}])"}},
                   .hidden_matrices = {"experts.*"}}};
  std::map<std::string, at::Tensor> wanted;
  for (const int64_t world : {1, 2, 4}) {
    const std::string json =
        json_of(kind, 2,
                c10::str(R"(, "moe": {"enabled": true, "num_experts": 4, "k": 2,
                     "expert_parallel_size": )",
                         std::min<int64_t>(world, 2), "}"));
    comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
      MoE moe{nullptr};
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(0);
        moe = MoE(
            5, 4, 2, [] { return nn::Linear(5, 5); },
            mesh_of(json, world, kind.options), ranks);
        moe->to(at::kDouble);
      });
      auto engine = initialize(moe, json, ranks, kind.options);
      const int64_t micro = engine.train_micro_batch_size_per_gpu();
      for (int64_t update = 0; update < 3; ++update) {
        const auto mine = batch_of(update)
                              .narrow(0, ranks.rank() * micro, micro)
                              .unsqueeze(1);
        engine.backward(loss_of(engine.forward(mine).output));
        engine.step();
      }
      for (const auto& shard : engine.shards()) {
        if (world == 1) wanted[shard.name] = shard.values.clone();
        const at::Tensor same = mesh::slice(wanted.at(shard.name), shard.box);
        EXPECT_TRUE(at::allclose(shard.values, same, 1e-10, 1e-12))
            << shard.name << " on " << world;
      }
    });
  }
}

struct TiedImpl : nn::Module {
  TiedImpl() {
    nn::Embedding tokens(7, 4);
    register_parameter("head", tokens->weight);
    register_module("tokens", tokens);
    register_module("token_embed", nn::Linear(4, 4));
    register_module("up", nn::Linear(4, 4));
    register_module("lm_head", nn::Linear(4, 7));
  }
};
TORCH_MODULE(Tied);

// Names of what has the momentum of Muon.
std::vector<std::string> orthogonalised(const InitializeOptions& options) {
  std::vector<std::string> found;
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    Tied net;
    const Kind kind{"", kMuon, options};
    const auto settings = detail::module_settings(json_of(kind, 0), 1, options);
    const auto embeddings = detail::embedding_names(*net);
    wrappers::FullyShardedCore core(*net, settings.mesh, ranks,
                                    {.zero_stage = 0});
    detail::ModuleUpdates updates(core.shards(), settings,
                                  options.hidden_matrices, embeddings, ranks);
    for (const auto& item : updates.optimizer().state()) {
      if (item.name.starts_with("momentum.")) found.push_back(item.parameter);
    }
  });
  return found;
}

TEST(ModuleUpdates, OrthogonaliseHiddenMatrices) {
  EXPECT_THAT(orthogonalised({}), ::testing::ElementsAre("up.weight"));
  EXPECT_THAT(orthogonalised({.hidden_matrices = {"up.*", "lm_head.*"}}),
              ::testing::UnorderedElementsAre("up.weight", "lm_head.weight"));
}

std::string refused(const Kind& kind) {
  std::string message;
  try {
    on_ranks(2, [&](auto& ranks, auto net) {
      initialize(net, json_of(kind, 2), ranks, kind.options);
    });
  } catch (const std::exception& error) {
    message = message_of(error);
  }
  return message;
}

TEST(ModuleUpdates, RefuseWhatContradicts) {
  EXPECT_THAT(refused({"", kAdamW, {.settings = {{"optimizer.lr", "0.5"}}}}),
              AllOf(HasSubstr("optimizer.lr is 0.5 (settings: optimizer.lr)"),
                    HasSubstr("but 0.01 by the JSON")));
  EXPECT_THAT(
      refused({"",
               kAdamW,
               {.settings = {{"optimizer.groups",
                              R"([{"match": "1.weight", "lr": 1}])"}}}}),
      AllOf(HasSubstr("optimizer.groups[0].match is \"1.weight\""),
            HasSubstr("Nearest: ")));
  EXPECT_THAT(refused({"", kAdamW, {.hidden_matrices = {"2.*"}}}),
              HasSubstr("hidden_matrices are of optimizer.type muon"));
  EXPECT_THAT(refused({"", kMuon, {.hidden_matrices = {"*.bias"}}}),
              HasSubstr("hidden_matrices is \"*.bias\""));
  EXPECT_THAT(refused({"", kAdamW, {.settings = {{"optimizer.emma", "0.9"}}}}),
              HasSubstr("optimizer.ema"));
}

TEST(ModuleUpdates, WarnOfWhatHasNoEffect) {
  const InitializeOptions options{
      .settings = {{"optimizer.muon.steps", "3"}, {"validate.ema", "true"}}};
  const auto settings =
      detail::module_settings(json_of({"", kAdamW, options}, 2), 2, options);
  EXPECT_THAT(settings.warnings,
              AllOf(Contains(HasSubstr("optimizer.muon.steps")),
                    Contains(HasSubstr("validate.ema has no effect"))));
  EXPECT_THAT(
      detail::module_settings(json_of(kinds()[0], 2), 2, kinds()[0].options)
          .warnings,
      Not(Contains(HasSubstr("optimizer"))));
}

TEST(ModuleUpdates, AveragesAreForForwardsAlone) {
  on_ranks(1, [&](auto& ranks, auto net) {
    const Kind& kind = kinds()[1];
    auto engine = initialize(net, json_of(kind, 2), ranks, kind.options);
    {
      // Before the first update they are the parameters.
      const auto averages = engine.averaged();
      const auto whole = engine.gather();
      expect_equal(values_of(*net), values_of(*small_net()), 0.0);
    }
    train(engine, 0, 1);
    const auto averages = engine.averaged();
    EXPECT_THROW(std::ignore = engine.averaged(), c10::Error);
    EXPECT_THROW(engine.backward(loss_of(engine.forward(batch_of(0)))),
                 c10::Error);
    EXPECT_THROW(engine.save_checkpoint("nowhere"), c10::Error);
    EXPECT_THROW(engine.load_checkpoint("nowhere"), c10::Error);
  });
  on_ranks(1, [&](auto& ranks, auto net) {
    auto engine = initialize(net, json_of(kinds()[0], 2), ranks);
    try {
      std::ignore = engine.averaged();
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(message_of(error), HasSubstr("optimizer.ema"));
    }
  });
}

}  // namespace
}  // namespace tessera
