// initialize()'s engine against LibTorch's own loop on one rank, in double.
#include "tessera/module_engine/initialize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/module_engine/detail/module_settings.h"
#include "tessera/wrappers/moe.h"
#include "tests/support/small_net.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using tests::batch_of;
using tests::expect_equal;
using tests::loss_of;
using tests::on_ranks;
using tests::small_net;
using tests::Values;
using tests::values_of;

constexpr int kUpdates = 6;

std::string json_of(int64_t stage, int64_t accumulation,
                    const std::string& more = "") {
  return c10::str(R"({"train_batch_size": 12, "gradient_accumulation_steps": )",
                  accumulation, R"(,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4,
    "warmup_max_lr": 0.02, "warmup_type": "linear"}},
  "gradient_clipping": 0.5)",
                  more, R"(, "zero_optimization": {"stage": )", stage, "}}");
}

// DeepSpeed's WarmupLR, as json_of() has it.
double lr_of(int64_t update) {
  return 0.02 * std::min(1.0, std::max(0.0, (update - 1) / 4.0));
}

Values one_rank() {
  auto net = small_net();
  torch::optim::AdamW optimizer(
      net->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  for (int64_t update = 0; update < kUpdates; ++update) {
    static_cast<torch::optim::AdamWOptions&>(
        optimizer.param_groups()[0].options())
        .lr(lr_of(update));
    optimizer.zero_grad();
    loss_of(net->forward(batch_of(update))).backward();
    nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
  }
  return values_of(*net);
}

// Updates [first, last) of this rank's share.
template <typename Engine>
void train(Engine& engine, int64_t first, int64_t last) {
  const int64_t micro = engine.train_micro_batch_size_per_gpu();
  const int64_t steps = engine.gradient_accumulation_steps();
  for (int64_t update = first; update < last; ++update) {
    EXPECT_EQ(engine.global_steps(), update);
    EXPECT_DOUBLE_EQ(engine.lr(), lr_of(update));
    const at::Tensor mine = batch_of(update).narrow(
        0, engine.rank() * micro * steps, micro * steps);
    for (int64_t m = 0; m < steps; ++m) {
      EXPECT_EQ(engine.is_gradient_accumulation_boundary(), m + 1 == steps);
      const auto loss =
          loss_of(engine.forward(mine.narrow(0, m * micro, micro)));
      engine.backward(loss);
      engine.step();
    }
  }
}

TEST(Initialize, EqualsOneRank) {
  const Values wanted = one_rank();
  for (const int64_t stage : {0, 1, 2, 3}) {
    for (const int64_t world : {1, 2, 3}) {
      for (const int64_t accumulation : {1, 2}) {
        SCOPED_TRACE(c10::str("stage ", stage, " ranks ", world,
                              " accumulation ", accumulation));
        on_ranks(world, [&](auto& ranks, auto net) {
          auto engine = initialize(net, json_of(stage, accumulation), ranks);
          EXPECT_EQ(engine.local_rank(), ranks.rank());
          EXPECT_EQ(engine.zero_optimization_stage(), stage);
          train(engine, 0, kUpdates);
          const auto whole = engine.gather();
          expect_equal(values_of(*net), wanted, 1e-10);
        });
      }
    }
  }
}

TEST(Initialize, KeepsParametersBetweenPassesWhereItIsAsked) {
  const auto gathers = [](const std::string& reshard) {
    int64_t calls = 0;
    on_ranks(2, [&](auto& ranks, auto net) {
      auto engine =
          initialize(net, json_of(3, 1), ranks,
                     {.settings = {{"zero.reshard_after_forward", reshard}}});
      train(engine, 0, 1);
      for (auto* group : ranks.groups()) group->reset_stats();
      train(engine, 1, 2);
      if (ranks.rank() > 0) return;
      for (auto* group : ranks.groups()) {
        for (const auto& verb : group->stats()) {
          calls += verb.verb == "all_gather" ? verb.calls : 0;
        }
      }
    });
    return calls;
  };
  EXPECT_LT(gathers("false"), gathers("true"));
  const auto settings = detail::module_settings(
      json_of(3, 1), 2, {.settings = {{"zero.bucket_mb", "1"}}});
  EXPECT_THAT(settings.warnings, Contains(HasSubstr("zero.bucket_mb")));
}

TEST(Initialize, GoesOnFromACheckpointOfOtherRanksAndStage) {
  const TemporaryFolder made;
  const auto& folder = made.path();
  on_ranks(2, [&](auto& ranks, auto net) {
    auto engine = initialize(net, json_of(3, 2), ranks);
    EXPECT_EQ(engine.load_checkpoint(folder), std::nullopt);
    train(engine, 0, 2);
    engine.save_checkpoint(folder, "the second");
    train(engine, 2, 3);
    engine.save_checkpoint(folder, "the third");
  });
  const Values wanted = one_rank();
  for (const auto& from : {folder, folder / "step-2"}) {
    for (const int64_t stage : {0, 1, 3}) {
      on_ranks(3, [&](auto& ranks, auto net) {
        auto engine = initialize(net, json_of(stage, 1), ranks);
        EXPECT_EQ(engine.load_checkpoint(from),
                  from == folder ? "the third" : "the second");
        train(engine, from == folder ? 3 : 2, kUpdates);
        const auto whole = engine.gather();
        expect_equal(values_of(*net), wanted, 1e-10);
      });
    }
  }
}

// Over fp32 masters, also where nothing was to be sharded.
TEST(Initialize, ComputesInBf16) {
  for (const int64_t stage : {0, 2}) {
    on_ranks(
        2,
        [&](auto& ranks, auto net) {
          auto engine = initialize(
              net, json_of(stage, 1, R"(, "bf16": {"enabled": true})"), ranks);
          EXPECT_EQ(engine.zero_optimization_stage(), std::max(stage, 1L));
          const auto mine = batch_of(0).narrow(0, 0, 6).to(at::kFloat);
          const at::Tensor out = engine.forward(mine);
          EXPECT_EQ(out.scalar_type(), at::kBFloat16);
          engine.backward(loss_of(out));
          engine.step();
          EXPECT_EQ(net->parameters()[0].scalar_type(), at::kFloat);
        },
        at::kFloat);
  }
}

std::string refused(const std::string& json) {
  auto net = small_net();
  try {
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      initialize(net, json, ranks);
    });
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

// One rank's third batch overflows: no rank updates, and all halve the scale.
TEST(Initialize, SkipsWhatOverflowsInFp16) {
  const TemporaryFolder made;
  const auto& folder = made.path();
  const std::string fp16 = R"(, "fp16": {"enabled": true, "hysteresis": 1,
    "initial_scale_power": 8, "loss_scale_window": 2})";
  on_ranks(
      2,
      [&](auto& ranks, auto net) {
        auto engine = initialize(net, json_of(2, 1, fp16), ranks);
        EXPECT_EQ(engine.loss_scale(), 256);
        std::vector<double> scales, rates;
        for (int64_t update = 0; update < 5; ++update) {
          at::Tensor mine =
              batch_of(update).narrow(0, 6 * ranks.rank(), 6).to(at::kFloat);
          if (update == 2 && ranks.rank() == 1) mine = mine / 0;
          const Values before = values_of(*net);
          rates.push_back(engine.lr());
          const at::Tensor out = engine.forward(mine);
          EXPECT_EQ(out.scalar_type(), at::kHalf);
          engine.backward(loss_of(out));
          engine.step();
          scales.push_back(engine.loss_scale());
          EXPECT_EQ(engine.skipped_steps(), update < 2 ? 0 : 1);
          if (update == 2) expect_equal(values_of(*net), before, 0.0);
        }
        EXPECT_EQ(scales, (std::vector<double>{256, 512, 256, 256, 512}));
        EXPECT_EQ(rates, (std::vector<double>{lr_of(0), lr_of(1), lr_of(2),
                                              lr_of(2), lr_of(3)}));
        engine.save_checkpoint(folder);
      },
      at::kFloat);
  on_ranks(
      1,
      [&](auto& ranks, auto net) {
        auto engine = initialize(net, json_of(3, 1, fp16), ranks);
        engine.load_checkpoint(folder);
        EXPECT_EQ(engine.loss_scale(), 512);
        EXPECT_EQ(engine.skipped_steps(), 1);
        EXPECT_EQ(engine.global_steps(), 5);
        EXPECT_EQ(engine.lr(), lr_of(4));
      },
      at::kFloat);
}

TEST(Initialize, NamesItsOwnKeyAtTheFloorOfTheScale) {
  const std::string floor = R"(, "fp16": {"enabled": true, "hysteresis": 1,
    "initial_scale_power": 0, "min_loss_scale": 1})";
  on_ranks(
      1,
      [&](auto& ranks, auto net) {
        auto engine = initialize(net, json_of(2, 1, floor), ranks);
        engine.backward(
            loss_of(engine.forward(batch_of(0).to(at::kFloat) / 0)));
        try {
          engine.step();
          FAIL() << "it went on";
        } catch (const Error& error) {
          EXPECT_THAT(message_of(error),
                      AllOf(HasSubstr("initialize: a gradient is not finite"),
                            HasSubstr("fp16.min_loss_scale")));
        }
      },
      at::kFloat);
}

// A scale that is fixed cannot mend what is lost.
TEST(Initialize, EndsWhereUpdateAfterUpdateChangesNothing) {
  const std::string fixed = R"(, "fp16": {"enabled": true, "loss_scale": 128})";
  int64_t updates = 0;
  try {
    on_ranks(
        1,
        [&](auto& ranks, auto net) {
          auto engine = initialize(net, json_of(2, 1, fixed), ranks);
          for (; updates < 100; ++updates) {
            engine.backward(
                loss_of(engine.forward(batch_of(0).to(at::kFloat) / 0)));
            engine.step();
          }
        },
        at::kFloat);
    FAIL() << "it went on";
  } catch (const std::exception& error) {
    EXPECT_EQ(updates, 10);
    EXPECT_THAT(message_of(error),
                HasSubstr("update 11 is the 11th in a row that changed "
                          "nothing"));
  }
}

// Worked by hand: Linear(1024, 4096), ReLU, Linear(4096, 10), batches of 32.
TEST(Initialize, SharesOutTheFirstExample) {
  const std::string json = R"({"train_batch_size": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2, "allgather_partitions": true,
      "reduce_scatter": true, "overlap_comm": true,
      "allgather_bucket_size": 2e8}})";
  const std::map<int64_t, int64_t> largest = {
      {1, 4239370}, {2, 2119685}, {4, 1061891}, {8, 532994}};
  for (const auto& [world, elements] : largest) {
    comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
      nn::Sequential net{nullptr};
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(0);
        net = nn::Sequential(nn::Linear(1024, 4096), nn::ReLU(),
                             nn::Linear(4096, 10));
      });
      auto engine = initialize(net, json, ranks);
      EXPECT_EQ(engine.train_micro_batch_size_per_gpu(), 32 / world);
      EXPECT_EQ(engine.gradient_accumulation_steps(), 1);
      int64_t mine = 0;
      for (const auto& shard : engine.shards()) mine += shard.values.numel();
      EXPECT_LE(mine, elements);
      EXPECT_TRUE(ranks.rank() > 0 || mine == elements) << mine;
      const auto input = at::ones({32 / world, 1024});
      double first = 0;
      for (int update = 0; update < 3; ++update) {
        const auto loss = engine.forward(input).mean();
        engine.backward(loss);
        engine.step();
        if (update == 0) first = loss.template item<double>();
        EXPECT_LE(loss.template item<double>(), first);
      }
    });
  }
  on_ranks(3, [&](auto& ranks, auto net) {
    try {
      initialize(net, json, ranks);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      EXPECT_THAT(message_of(error), HasSubstr("32 = 3 x ? x ?"));
    }
  });
}

// Once an update, by all its micro-batches; not where it was skipped.
TEST(Initialize, MovesTheBiasesOfExperts) {
  static constexpr int64_t kSamples = 8, kWidth = 6;
  const TemporaryFolder made;
  const auto input_of = [](int64_t update) {
    return (at::arange(kSamples * 3 * kWidth, at::kDouble) * 0.7 + update)
        .sin()
        .view({kSamples, 3, kWidth});
  };
  const auto json_on = [](int64_t world) {
    return c10::str(R"({"train_batch_size": 8,
      "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
      "moe": {"enabled": true, "num_experts": 4, "k": 2,
              "expert_parallel_size": )",
                    world, "}}");
  };
  struct Result {
    at::Tensor bias, output;
  };
  // Updates from where a checkpoint is up to `last`.
  const auto run = [&](int64_t world, int64_t last) {
    Result result;
    comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
      MoE moe{nullptr};
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(4);
        moe = MoE(
            kWidth, /*experts=*/4, /*k=*/2,
            [] { return nn::Linear(kWidth, kWidth); },
            mesh_of(json_on(world), world), ranks,
            MoEOptions{.bias_rate = 0.01});
        moe->to(at::kDouble);
      });
      auto engine = initialize(moe, json_on(world), ranks,
                               {.settings = {{"zero.expert_stage", "1"}}});
      engine.load_checkpoint(made.path());
      const int64_t micro = engine.train_micro_batch_size_per_gpu();
      while (engine.global_steps() < last) {
        const at::Tensor batch = input_of(engine.global_steps());
        for (int64_t m = 0; m < 2; ++m) {
          const at::Tensor x =
              batch.narrow(0, (2 * ranks.rank() + m) * micro, micro);
          engine.backward(engine.forward(x).output.square().mean());
          engine.step();
        }
      }
      engine.save_checkpoint(made.path());
      const at::NoGradGuard no_grad;
      const at::Tensor output = engine.forward(input_of(9)).output;
      if (ranks.rank() == 0) {
        result = {moe->named_buffers()["score_bias"].clone(), output.clone()};
      }
    });
    return result;
  };
  const Result wanted = run(/*world=*/1, /*last=*/5);
  EXPECT_GT(wanted.bias.abs().max().item<double>(), 0.009);
  std::filesystem::remove_all(made.path());
  run(/*world=*/2, /*last=*/2);
  const Result found = run(/*world=*/1, /*last=*/5);
  EXPECT_TRUE(at::equal(found.bias, wanted.bias)) << found.bias << wanted.bias;
  EXPECT_TRUE(at::allclose(found.output, wanted.output, 1e-10, 1e-12));
}

// Worked by hand: 32 experts of Linear(2048, 2048) with ep 8, batches of 64.
TEST(Initialize, LaysOutTheSecondExample) {
  const std::string json = R"({"train_batch_size": 64,
    "zero_optimization": {"stage": 2}, "moe": {"enabled": true,
      "num_experts": 32, "k": 2, "expert_parallel_size": 8}})";
  for (const int64_t world : {8, 16, 32, 64}) {
    const auto settings = detail::module_settings(json, world, {});
    EXPECT_EQ(settings.mesh.degree(mesh::Axis::kEp), 8);
    EXPECT_EQ(settings.mesh.degree(mesh::Axis::kExpertDp), world / 8);
    EXPECT_EQ(settings.config.batch.micro, 64 / world);
    EXPECT_EQ(settings.accumulation, 1);
    EXPECT_THAT(settings.notes, Contains(HasSubstr("has no optimizer")));
  }
  for (const int64_t world : {1, 2, 4, 12, 24}) {
    EXPECT_THROW(detail::module_settings(json, world, {}), Error) << world;
  }
  const auto first =
      comm::make_communicator({.backend = "fake", .rank = 0, .world_size = 8});
  const MoE wide(
      2048, 32, 2, [] { return nn::Linear(2048, 2048); }, mesh_of(json, 8),
      *first);
  EXPECT_EQ(wide->num_parameters(), 134283264 + 65536);
  EXPECT_EQ(wide->num_active_parameters(), 8458240);
  int64_t held = 0;
  for (const auto& each : wide->named_parameters()) {
    if (each.key().starts_with("experts.")) held += each.value().numel();
  }
  EXPECT_EQ(held, 16785408);
  // The same on eight ranks, with experts that are narrower.
  comm::run_threads(8, "shm", [&](comm::Communicator& ranks) {
    const auto on = mesh_of(json, 8);
    const auto make = [&](int64_t experts) {
      return MoE(16, experts, 2, [] { return nn::Linear(16, 16); }, on, ranks);
    };
    MoE moe{nullptr}, other{nullptr};
    comm::in_turn(ranks.world(), [&] { moe = make(32), other = make(16); });
    EXPECT_THROW(initialize(other, json, ranks), Error);
    auto engine = initialize(moe, json, ranks);
    const auto shards = engine.shards();
    int64_t experts = 0, gate = 0;
    for (const auto& shard : shards) {
      (shard.name.starts_with("experts.") ? experts : gate) +=
          shard.values.numel();
    }
    EXPECT_EQ(experts, 4 * (16 * 16 + 16));
    EXPECT_EQ(gate, 32 * 16 / 8);
    const auto [output, aux_loss, counts] =
        engine.forward(at::randn({8, 3, 16}));
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{8, 3, 16}));
    engine.backward(output.pow(2).mean() + 0.01 * aux_loss);
    engine.step();
  });
  EXPECT_THAT(refused(R"({"train_batch_size": 4, "moe": {"enabled": true,
                "num_experts": 4, "k": 1, "expert_parallel_size": 1}})"),
              HasSubstr("the module has no tessera::MoE"));
  on_ranks(1, [](auto& ranks, auto net) {
    try {
      initialize(net, json_of(1, 1), ranks,
                 {.settings = {{"zero.expert_stage", "2"}}});
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(message_of(error), HasSubstr("zero.expert_stage is 2, but"));
    }
  });
}

TEST(Initialize, RefusesWhatAModuleHasNot) {
  EXPECT_THAT(refused("{}"), HasSubstr("give train_batch_size"));
  EXPECT_THAT(refused(R"({"train_batch_size": 4, "pipeline": {"stages": 2}})"),
              AllOf(HasSubstr("mesh.pp is 2 (the JSON:1:"),
                    HasSubstr("its stages are not known")));
  EXPECT_THAT(refused(R"({"train_batch_size": 4,
                          "tensor_parallel": {"autotp_size": 2}})"),
              HasSubstr("parallelize()"));
  EXPECT_THAT(refused(R"({"train_batch_sise": 4})"),
              HasSubstr("train_batch_size"));
  EXPECT_THAT(
      refused(R"({"train_batch_size": 4, "zero_optimization": {"stage": 3,
                  "offload_optimizer": {"device": "nvme"}}})"),
      AllOf(HasSubstr("zero.offload is optimizer (the JSON:2:"),
            HasSubstr("of 'tessera train'")));
  EXPECT_THAT(refused("/nowhere/ds.json"),
              HasSubstr("no such configuration of DeepSpeed's"));
}

TEST(Initialize, RefusesCallsInAnotherOrder) {
  on_ranks(1, [&](auto& ranks, auto net) {
    auto engine = initialize(net, json_of(2, 2), ranks);
    EXPECT_THROW(engine.step(), c10::Error);
    const auto input = batch_of(0).narrow(0, 0, 6);
    EXPECT_THROW(engine.backward(engine.forward(input)), c10::Error);
  });
  on_ranks(1, [&](auto& ranks, auto net) {
    auto engine = initialize(net, json_of(2, 2), ranks);
    const auto input = batch_of(0).narrow(0, 0, 6);
    engine.backward(loss_of(engine.forward(input)));
    EXPECT_THROW(engine.save_checkpoint("nowhere"), c10::Error);
    engine.step();
    EXPECT_THROW(engine.save_checkpoint("nowhere"), c10::Error);
  });
}

}  // namespace
}  // namespace tessera
