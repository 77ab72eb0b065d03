// Steps on a device whose memory the host cannot reach, a GPU's or the test
// device's, beside the same steps on the CPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tests/device/device_runs.h"

namespace tessera::testing {
namespace {

struct Case {
  std::string name;
  int64_t ranks;
  Keys set;
  double bound = 1e-9;
  bool is_mixed = false;  // the second of two stages is on the CPU
};

// Of each step: this rank's loss, the norm; then its parameters.
struct Ran {
  std::vector<double> numbers;
  std::vector<at::Tensor> parameters;
  int64_t reads_a_step = 0;
};

constexpr int64_t kSteps = 3;

Ran run_rank(const engine::RunConfig& config, comm::Communicator& ranks) {
  engine::RankModel model(config, ranks);
  Ran ran;
  for (int64_t number = 0; number < kSteps; ++number) {
    const int64_t before = host_reads();
    step(model, config, number);
    ran.reads_a_step = host_reads() - before;
    ran.numbers.push_back(model.actor().loss_sum());
    ran.numbers.push_back(model.actor().grad_norm());
  }
  const auto& parameters = *model.composed().parameters;
  const auto there = engine::device_of_rank(config, ranks.rank());
  const bool in_files = config.zero.offload == "all";
  for (const auto& each : parameters.parameters()) {
    EXPECT_EQ(each.shard.device().type(), in_files ? at::kCPU : there)
        << each.name;
    for (const auto& full : parameters.full(each.unit)) {
      EXPECT_EQ(full.device().type(), there) << each.name;
    }
    ran.parameters.push_back(each.shard.to(at::kCPU, /*non_blocking=*/false,
                                           /*copy=*/true));
  }
  return ran;
}

std::vector<Ran> run(const Case& what, at::Device device) {
  auto config = configuration(what.set, what.ranks, device);
  if (what.is_mixed) config.run.device_types = {device.type(), at::kCPU};
  std::vector<Ran> all(what.ranks);
  comm::run_threads(what.ranks, "shm", [&](comm::Communicator& ranks) {
    all[ranks.rank()] = run_rank(config, ranks);
  });
  return all;
}

class OnADevice : public ::testing::TestWithParam<Case> {};

TEST_P(OnADevice, StepsAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const bool is_fp8 = GetParam().name.starts_with("fp8");
  if (is_fp8 && !multiplies_fp8()) GTEST_SKIP() << kNoFp8;
  const auto here = run(GetParam(), at::kCPU);
  const auto there = run(GetParam(), *device());
  const double bound = GetParam().bound;
  for (size_t rank = 0; rank < here.size(); ++rank) {
    for (size_t i = 0; i < here[rank].numbers.size(); ++i) {
      EXPECT_NEAR(there[rank].numbers[i], here[rank].numbers[i],
                  bound * std::abs(here[rank].numbers[i]));
    }
    ASSERT_EQ(there[rank].parameters.size(), here[rank].parameters.size());
    // An update by the sign of a gradient makes much of its rounding.
    const bool is_exact = bound < 1e-8;
    for (size_t i = 0; is_exact && i < here[rank].parameters.size(); ++i) {
      EXPECT_TRUE(at::allclose(there[rank].parameters[i],
                               here[rank].parameters[i], 10 * bound,
                               bound / 10));
    }
    const bool is_one_kernel =
        GetParam().name.starts_with("experts_bf16") && multiplies_groups();
    EXPECT_EQ(there[rank].reads_a_step,
              is_one_kernel ? 1 : here[rank].reads_a_step);
  }
}

std::vector<Case> cases() {
  return {
      {"one_rank", 1, {}},
      {"accumulated", 1, {{"batch.micro", "2"}}},
      {"gpt2", 1, {{"model.family", "gpt2"}, {"model.kv_heads", "4"}}},
      {"qwen3", 1, {{"model.family", "qwen3"}}},
      {"olmo2", 1, {{"model.family", "olmo2"}}},
      {"gemma3",
       1,
       {{"model.family", "gemma3_text"},
        {"model.window", "5"},
        {"model.window_every", "2"}}},
      {"mixtral", 1, {{"model.family", "mixtral"}, {"model.moe.experts", "4"}}},
      {"capacity",
       1,
       {{"model.family", "mixtral"},
        {"model.moe.experts", "4"},
        {"model.moe.capacity_factor", "1.0"}}},
      {"deepseek",
       1,
       {{"model.family", "deepseek_v3"},
        {"model.kv_heads", "4"},
        {"model.moe.experts", "4"},
        {"model.moe.groups", "2"},
        {"model.mtp.layers", "1"},
        {"model.moe.shared_experts", "1"},
        {"model.moe.bias_balance", "true"}}},
      {"dp_2", 2, {{"mesh.dp", "2"}}},
      {"zero_1", 2, {{"mesh.dp", "2"}, {"zero.stage", "1"}}},
      {"zero_2", 2, {{"mesh.dp", "2"}, {"zero.stage", "2"}}},
      {"zero_3", 2, {{"mesh.dp", "2"}, {"zero.stage", "3"}}},
      {"hybrid",
       4,
       {{"mesh.dp_replicate", "2"},
        {"mesh.dp_shard", "2"},
        {"zero.stage", "3"}}},
      {"tp_2", 2, {{"mesh.tp", "2"}}},
      {"sp_2", 2, {{"mesh.tp", "2"}, {"tensor.sequence_parallel", "true"}}},
      {"ring", 2, {{"mesh.cp", "2"}}},
      {"ulysses", 2, {{"mesh.cp", "2"}, {"context.method", "ulysses"}}},
      {"pp_2", 2, {{"mesh.pp", "2"}, {"batch.micro", "2"}}},
      {"zb_h1",
       2,
       {{"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"pipeline.schedule", "zb_h1"}}},
      {"pipedream",
       2,
       {{"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"pipeline.schedule", "pipedream_2bw"}}},
      {"ep_2",
       2,
       {{"mesh.dp", "2"},
        {"mesh.ep", "2"},
        {"model.family", "mixtral"},
        {"model.moe.experts", "4"}}},
      {"ep_2_chunks",
       2,
       {{"mesh.dp", "2"},
        {"mesh.ep", "2"},
        {"model.family", "mixtral"},
        {"model.moe.experts", "4"},
        {"expert.dispatch_chunks", "2"}}},
      {"all",
       8,
       {{"mesh.dp", "2"},
        {"mesh.tp", "2"},
        {"mesh.pp", "2"},
        {"mesh.ep", "2"},
        {"zero.stage", "2"},
        {"model.family", "mixtral"},
        {"batch.micro", "2"},
        {"model.moe.experts", "4"}}},
      {"recomputed", 1, {{"recompute.mode", "block"}}},
      {"recomputed_cores", 1, {{"recompute.mode", "selective"}}},
      {"muon",
       2,
       {{"mesh.dp", "2"}, {"zero.stage", "1"}, {"optimizer.type", "muon"}}},
      {"fp32", 1, {{"precision.compute", "fp32"}}, 1e-4},
      {"bf16",
       2,
       {{"precision.compute", "bf16"}, {"mesh.dp", "2"}, {"zero.stage", "3"}},
       2e-2},
      {"fp8",
       2,
       {{"precision.compute", "bf16"},
        {"precision.products", "fp8"},
        {"mesh.dp", "2"},
        {"zero.stage", "3"}},
       2e-2},
      {"fp8_gpt2",
       2,
       {{"precision.compute", "bf16"},
        {"precision.products", "fp8"},
        {"model.family", "gpt2"},
        {"model.kv_heads", "4"},
        {"batch.micro", "4"},
        {"recompute.mode", "block"},
        {"mesh.tp", "2"}},
       2e-2},
      {"fp8_zb_h1",
       2,
       {{"precision.compute", "bf16"},
        {"precision.products", "fp8"},
        {"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"pipeline.schedule", "zb_h1"}},
       2e-2},
      {"experts_bf16",
       1,
       {{"precision.compute", "bf16"},
        {"model.family", "mixtral"},
        {"model.moe.experts", "4"},
        {"batch.micro", "4"}},
       2e-2},
      {"experts_bf16_zb_h1",
       2,
       {{"precision.compute", "bf16"},
        {"model.family", "mixtral"},
        {"model.moe.experts", "4"},
        {"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"pipeline.schedule", "zb_h1"}},
       2e-2},
      {"averages", 1, {{"optimizer.ema", "0.9"}}},
      {"dropout", 1, {{"model.dropout", "0.2"}, {"batch.micro", "2"}}},
      {"dropout_gpt2",
       1,
       {{"model.dropout", "0.2"},
        {"model.family", "gpt2"},
        {"model.kv_heads", "4"}}},
      {"dropout_window",
       1,
       {{"model.dropout", "0.2"},
        {"model.family", "gemma3_text"},
        {"model.window", "5"},
        {"model.window_every", "2"}}},
      {"dropout_cores",
       1,
       {{"model.dropout", "0.2"}, {"recompute.mode", "selective"}}},
      {"dropout_tp_2", 2, {{"model.dropout", "0.2"}, {"mesh.tp", "2"}}},
      {"dropout_sp_2",
       2,
       {{"model.dropout", "0.2"},
        {"mesh.tp", "2"},
        {"tensor.sequence_parallel", "true"}}},
      {"dropout_ring", 2, {{"model.dropout", "0.2"}, {"mesh.cp", "2"}}},
      {"dropout_pp_2",
       2,
       {{"model.dropout", "0.2"},
        {"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"recompute.mode", "block"}}},
      {"dropout_bf16",
       1,
       {{"model.dropout", "0.2"}, {"precision.compute", "bf16"}},
       2e-2},
      {"offload", 1, {{"zero.offload", "optimizer"}}},
      {"offload_zero_2",
       2,
       {{"zero.offload", "optimizer"}, {"mesh.dp", "2"}, {"zero.stage", "2"}}},
      {"offload_zero_3",
       2,
       {{"zero.offload", "optimizer"}, {"mesh.dp", "2"}, {"zero.stage", "3"}}},
      {"offload_pp_2",
       2,
       {{"zero.offload", "optimizer"},
        {"mesh.pp", "2"},
        {"batch.micro", "2"},
        {"optimizer.ema", "0.9"}}},
      {"offload_mixed",
       2,
       {{"zero.offload", "optimizer"}, {"mesh.pp", "2"}, {"batch.micro", "2"}},
       1e-9,
       /*is_mixed=*/true},
      {"offload_sgd",
       1,
       {{"zero.offload", "optimizer"}, {"optimizer.type", "sgd"}}},
      {"offload_lion",
       1,
       {{"zero.offload", "optimizer"}, {"optimizer.type", "lion"}}},
      {"offload_muon",
       2,
       {{"zero.offload", "optimizer"},
        {"mesh.dp", "2"},
        {"zero.stage", "1"},
        {"optimizer.type", "muon"}}},
      {"offload_bf16",
       2,
       {{"zero.offload", "optimizer"},
        {"precision.compute", "bf16"},
        {"mesh.dp", "2"},
        {"zero.stage", "3"}},
       2e-2},
      {"files", 1, {{"zero.offload", "all"}, {"zero.stage", "3"}}},
      {"files_kept",
       1,
       {{"zero.offload", "all"},
        {"zero.stage", "3"},
        {"zero.reshard_after_forward", "false"},
        {"optimizer.ema", "0.9"}}},
      {"files_zero_3",
       2,
       {{"zero.offload", "all"}, {"mesh.dp", "2"}, {"zero.stage", "3"}}},
      {"files_hybrid",
       4,
       {{"zero.offload", "all"},
        {"mesh.dp_replicate", "2"},
        {"mesh.dp_shard", "2"},
        {"zero.stage", "3"}}},
      {"files_replicas",
       2,
       {{"zero.offload", "all"},
        {"mesh.dp_replicate", "2"},
        {"zero.stage", "3"}}},
      {"files_pp_2",
       2,
       {{"zero.offload", "all"},
        {"zero.stage", "3"},
        {"mesh.pp", "2"},
        {"batch.micro", "2"}}},
      {"files_mixed",
       2,
       {{"zero.offload", "all"},
        {"zero.stage", "3"},
        {"mesh.pp", "2"},
        {"model.family", "gpt2"},
        {"model.kv_heads", "4"},
        {"batch.micro", "2"}},
       1e-9,
       /*is_mixed=*/true},
      {"files_muon",
       2,
       {{"zero.offload", "all"},
        {"mesh.dp", "2"},
        {"zero.stage", "3"},
        {"optimizer.type", "muon"}}},
      {"files_adapters",
       1,
       {{"zero.offload", "all"},
        {"zero.stage", "3"},
        {"model.lora.rank", "4"}}},
      {"files_experts",
       2,
       {{"zero.offload", "all"},
        {"zero.stage", "3"},
        {"mesh.dp", "2"},
        {"mesh.ep", "2"},
        {"model.family", "mixtral"},
        {"model.moe.experts", "4"}}},
      {"files_bf16",
       1,
       {{"zero.offload", "all"},
        {"precision.compute", "bf16"},
        {"zero.stage", "3"}},
       2e-2},
      {"mixed",
       4,
       {{"mesh.pp", "2"}, {"mesh.dp", "2"}, {"batch.micro", "2"}},
       1e-9,
       /*is_mixed=*/true},
      {"mixed_tied",
       2,
       {{"mesh.pp", "2"},
        {"model.family", "gpt2"},
        {"model.kv_heads", "4"},
        {"batch.micro", "2"}},
       1e-9,
       /*is_mixed=*/true},
  };
}

INSTANTIATE_TEST_SUITE_P(, OnADevice, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// With other rates and tokens in each; a step for which nothing was recorded,
// of another number of targets, and an evaluation between.
std::vector<double> steps_of(at::Device device, Keys keys = {},
                             size_t late = 0) {
  keys.emplace_back("batch.micro", "2");
  const auto config = configuration(keys, 1, device);
  std::vector<double> numbers;
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    engine::RankModel model(config, ranks);
    std::deque<engine::ModelActor::Unread> unread;
    const auto settle = [&](size_t but) {
      while (unread.size() > but) {
        model.actor().settle(std::move(unread.front()));
        unread.pop_front();
        numbers.push_back(model.actor().loss_sum());
        numbers.push_back(model.actor().grad_norm());
      }
    };
    for (int64_t number = 0; number < 7; ++number) {
      const double lr = 1e-2 / static_cast<double>(number + 1);
      auto input = engine::step_input(
          config, number, lr, [&](int64_t of, int64_t first, int64_t n) {
            return verify::random_batch(config, of, first, n);
          });
      if (number == 3) input.read.num_targets = [](int64_t) { return 77; };
      model.run_step(std::move(input));
      unread.push_back(model.actor().begin_to_settle());
      settle(late);
      if (number != 4) continue;
      settle(0);
      const auto loss = model.evaluate(verify::random_batch(config, 0, 0, 2));
      numbers.push_back(read_on_host(loss.sum).item<double>());
    }
    settle(0);
    EXPECT_EQ(model.repeats_steps(), device.is_cuda());
  });
  return numbers;
}

TEST(StepGraph, RepeatsWhatTheCpuRuns) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  const auto here = steps_of(at::kCPU);
  for (const size_t late : {0, 2}) {
    const auto there = steps_of(*device(), {}, late);
    ASSERT_EQ(there.size(), here.size());
    for (size_t i = 0; i < here.size(); ++i) {
      EXPECT_NEAR(there[i], here[i], 1e-9 * std::abs(here[i]))
          << i << ", late " << late;
    }
  }
}

TEST(OfADevice, StepsThatAreReadLateAreTheSame) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  EXPECT_EQ(steps_of(at::kCPU, {}, 2), steps_of(at::kCPU));
  if (!at::hasCUDA()) {
    EXPECT_EQ(steps_of(*device(), {}, 2), steps_of(*device()));
  }
}

TEST(StepGraph, RepeatsStepsOfExpertsThatOneKernelTakes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  if (!multiplies_groups()) GTEST_SKIP() << "needs a GPU of Hopper or later";
  const Keys keys = {{"precision.compute", "bf16"},
                     {"model.family", "mixtral"},
                     {"model.moe.experts", "4"}};
  const auto here = steps_of(at::kCPU, keys), there = steps_of(*device(), keys);
  ASSERT_EQ(there.size(), here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_NEAR(there[i], here[i], 2e-2 * std::abs(here[i])) << i;
  }
}

TEST(StepGraph, IsLeftWhereTheHostReadsSizes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  const auto config = configuration(
      {{"model.family", "mixtral"}, {"model.moe.experts", "4"}}, 1, *device());
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    engine::RankModel model(config, ranks);
    for (int64_t number = 0; number < 3; ++number) step(model, config, number);
    EXPECT_FALSE(model.repeats_steps());
  });
}

// On a GPU, whose updates read it where it lies, and on the test device, whose
// host reads it before.
TEST(OfADevice, ANormThatIsNoNumberChangesNoWeight) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const auto config = configuration({}, 1, *device());
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    engine::RankModel model(config, ranks);
    step(model, config, 0);
    const auto& parameters = model.composed().parameters->parameters();
    {
      const at::NoGradGuard no_grad;
      parameters.front().shard.fill_(NAN);
    }
    std::vector<at::Tensor> before;
    for (const auto& each : parameters) {
      before.push_back(each.shard.to(at::kCPU, /*non_blocking=*/false,
                                     /*copy=*/true));
    }
    EXPECT_THROW(step(model, config, 1), Error);
    for (size_t i = 1; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i].shard.cpu(), before[i]))
          << parameters[i].name;
    }
  });
}

// As over the host: a rank that is alone has the same numbers.
TEST(Nccl, StepsOfOneRankAreTheSame) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  const auto config = configuration({}, 1, *device());
  std::vector<std::vector<double>> numbers;
  for (const char* backend : {"shm", "nccl"}) {
    comm::run_threads({.backend = backend, .devices = {at::kCUDA}},
                      [&](comm::Communicator& ranks) {
                        numbers.push_back(run_rank(config, ranks).numbers);
                      });
  }
  for (size_t i = 0; i < numbers[0].size(); ++i) {
    EXPECT_NEAR(numbers[1][i], numbers[0][i], 1e-9);
  }
}

}  // namespace
}  // namespace tessera::testing
