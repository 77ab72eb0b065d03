// Steps on a device whose memory the host cannot reach, a GPU's or the test
// device's, beside the same steps on the CPU.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host_read.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_model.h"
#include "tessera/monitor/memory.h"
#include "tessera/nn/composed_attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/fp8_product.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/grouped_linear.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/trainer.h"
#include "tessera/verify/random_batch.h"
#include "tests/support/disk.h"
#include "tests/support/test_device.h"

namespace tessera {
namespace {

constexpr const char* kNoDevice = "needs a GPU, beside a LibTorch with CUDA";

// A GPU, where there is one; none: see has_test_device().
std::optional<at::Device> device() {
  if (at::hasCUDA()) return at::Device(at::kCUDA, 0);
  if (testing::has_test_device()) return testing::test_device();
  return std::nullopt;
}

TEST(TestDevice, ComputesAsTheCpuDoes) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  const at::Tensor a = at::randn({4, 6}), b = at::randn({6, 3});
  const at::Device there = testing::test_device();
  const at::Tensor x = a.to(there).requires_grad_();
  const at::Tensor y = at::matmul(x, b.to(there)).relu();
  y.sum().backward();
  EXPECT_TRUE(at::equal(y.cpu(), at::matmul(a, b).relu()));
  EXPECT_EQ(x.grad().device(), there);
  EXPECT_GT(testing::reads_of_device(), 0);
}

TEST(TestDeviceDeathTest, CannotBeReachedByTheHost) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  const at::Tensor x = at::ones({3}, testing::test_device());
  EXPECT_DEATH(std::printf("%f", *x.const_data_ptr<float>()), "");
  EXPECT_THROW(x.add(at::ones({3})), std::exception);
}

using Keys = std::vector<std::pair<const char*, const char*>>;

// Else LibTorch's operators would stand in for them, and nothing would fail.
TEST(Gpu, HasLoopsOfItsOwn) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    EXPECT_TRUE(
        nn::gpu::runs(at::ones({1}, at::TensorOptions(at::kCUDA).dtype(type))));
  }
}

// What one mask keeps of ones, and the gradient that goes back through another.
TEST(DropoutOnADevice, MasksAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const nn::Dropout dropout = nn::dropout_named("a part", 0.3, {7, 3, 5});
  // Two pieces of a longer sequence, of odd lengths.
  const nn::Positions positions = {{5, 7}, {40, 6}};
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t width : {1, 63, 64, 65, 200}) {
      const auto kept = [&](at::Device where) {
        const at::Tensor x =
            at::ones({3, 13, width}, type).to(where).requires_grad_();
        const at::Tensor y = nn::add_kept({}, x.view_as(x), dropout, positions);
        y.sum().backward();
        return at::stack({y.detach(), x.grad()}).cpu();
      };
      EXPECT_TRUE(at::equal(kept(*device()), kept(at::kCPU))) << type << width;
    }
  }
}

// Of some heads of some samples, over keys behind the first ones; in parts of
// the samples where their scores are many.
TEST(DropoutOnADevice, AttentionDropsWhatTheCpusDrops) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const auto random = [](int64_t heads, int64_t tokens) {
    return at::randn({2, heads, tokens, 8}, at::kDouble);
  };
  nn::FlashRuns runs = {.is_causal = false,
                        .dropout = nn::dropout_named("weights", 0.4, {1, 2, 3}),
                        .first_query = 130,
                        .first_key = 37,
                        .window = 150};
  runs.dropout.first_head = 4;
  const at::Tensor q = random(4, 30), k = random(2, 90), v = random(2, 90);
  const at::Tensor gradient = random(4, 30);
  const auto there = [](const at::Tensor& x) { return x.to(*device()); };
  const auto by_token = [](const at::Tensor& x) {
    return x.transpose(1, 2).contiguous();
  };
  const auto [out, lse] =
      nn::composed_attention(there(q), there(k), there(v), runs);
  const auto [wanted, wanted_lse] =
      nn::flash_forward(by_token(q), by_token(k), by_token(v), runs);
  const auto is_near = [](const at::Tensor& a, const at::Tensor& b) {
    return at::allclose(a.cpu(), b, 1e-12, 1e-12);
  };
  EXPECT_TRUE(is_near(out, wanted.transpose(1, 2)));
  EXPECT_TRUE(is_near(lse, wanted_lse));
  const auto [dq, dk, dv] = nn::composed_attention_backward(
      there(gradient), there(q), there(k), there(v), out, lse, runs);
  const auto [wanted_dq, wanted_dk, wanted_dv] =
      nn::flash_backward(by_token(gradient), by_token(q), by_token(k),
                         by_token(v), wanted, wanted_lse, runs);
  EXPECT_TRUE(is_near(dq, wanted_dq.transpose(1, 2)));
  EXPECT_TRUE(is_near(dk, wanted_dk.transpose(1, 2)));
  EXPECT_TRUE(is_near(dv, wanted_dv.transpose(1, 2)));
}

constexpr const char* kNoFp8 = "needs a GPU of compute capability 8.9";

bool multiplies_fp8() {
  return !at::hasCUDA() ||
         nn::gpu::least_capability() >= nn::kLeastFp8Capability;
}

// The same bits in fp8; products as far apart as their sums, rounded to bf16.
// Of rows by a warp and by a block, in packs and not, and of one row alone.
TEST(OfADevice, Fp8ProductsAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  if (!multiplies_fp8()) GTEST_SKIP() << kNoFp8;
  const auto there = [](const at::Tensor& x) { return x.to(*device()); };
  const auto expect_same = [](const nn::Fp8Rows& found,
                              const nn::Fp8Rows& wanted) {
    EXPECT_TRUE(found.values.view(at::kByte).cpu().equal(
        wanted.values.view(at::kByte)));
    EXPECT_TRUE(found.scales.cpu().equal(wanted.scales));
  };
  struct Shape {
    int64_t rows, in, out, begin;
  };
  for (const auto& [rows, in, out, begin] :
       {Shape{1, 16, 32, 0}, {300, 144, 96, 1}, {64, 2048, 528, 0}}) {
    const at::Tensor x =
        (at::randn({rows, in}) * at::logspace(-4, 2, in)).to(at::kBFloat16);
    const at::Tensor bias = at::randn({out}).to(at::kBFloat16);
    // Not where moves of 16 bytes can begin.
    const at::Tensor memory = at::randn({out * in + begin}).to(at::kBFloat16);
    const auto weight_of = [&, in = in, out = out,
                            begin = begin](const at::Tensor& from) {
      return from.narrow(0, begin, out * in).view({out, in});
    };
    const at::Tensor weight = weight_of(memory);
    const at::Tensor weight_there = weight_of(there(memory));
    const auto a = nn::fp8_rows(x), b = nn::fp8_rows(weight);
    const auto a_there = nn::fp8_rows(there(x));
    const auto b_there = nn::fp8_rows(weight_there);
    expect_same(a_there, a);
    expect_same(b_there, b);
    expect_same(nn::fp8_columns(weight_there), nn::fp8_columns(weight));
    for (const auto sums : {nn::Sums::kExact, nn::Sums::kFast}) {
      for (const at::Tensor& added : {at::Tensor(), bias}) {
        const at::Tensor y = at::empty({rows, out}, x.options());
        const at::Tensor found = at::empty({rows, out}, weight_there.options());
        nn::fp8_product_into(y, a, b, added, sums);
        nn::fp8_product_into(found, a_there, b_there,
                             added.defined() ? there(added) : added, sums);
        const auto error = (found.cpu().to(at::kDouble) - y).norm() / y.norm();
        EXPECT_LT(error.item<double>(), 5e-3) << rows << " rows";
      }
    }
  }
}

// Whether one kernel takes the products of all experts, of bf16.
bool multiplies_groups() {
  return !at::hasCUDA() || nn::gpu::least_capability() >= 90;
}

// The second and the last of these have no row.
TEST(OfADevice, GroupedProductsAreThoseOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const std::vector<int64_t> sizes = {2, 0, 5, 0};
  const auto options = at::TensorOptions(at::kBFloat16);
  const auto rows = at::randn({7, 24}, options),
             weight = at::randn({4, 16, 24}, options),
             gradient = at::randn({7, 16}, options);
  const auto run = [&](at::Device device, const nn::RowGroups& groups) {
    const auto x = rows.clone().to(device).requires_grad_(),
               w = weight.clone().to(device).requires_grad_();
    const auto y = nn::grouped_product(x, w, groups);
    y.backward(gradient.to(device));
    return std::vector<at::Tensor>{y.detach(), x.grad(), w.grad()};
  };
  const auto here = run(at::kCPU, nn::RowGroups(sizes));
  const int64_t before = host_reads();
  const auto there =
      run(*device(), nn::RowGroups(at::tensor(sizes).to(*device()), 7));
  EXPECT_EQ(host_reads() - before, multiplies_groups() ? 0 : 1);
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(at::allclose(there[i].to(at::kCPU), here[i], 1e-2, 1e-2)) << i;
  }
}

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

void step(engine::RankModel& model, const engine::RunConfig& config,
          int64_t number) {
  model.step(engine::step_input(
      config, number, /*lr=*/1e-2, [&](int64_t of, int64_t first, int64_t n) {
        return verify::random_batch(config, of, first, n);
      }));
}

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
  for (const auto& each : model.composed().parameters->parameters()) {
    EXPECT_EQ(each.shard.device().type(),
              engine::device_of_rank(config, ranks.rank()))
        << each.name;
    ran.parameters.push_back(each.shard.to(at::kCPU, /*non_blocking=*/false,
                                           /*copy=*/true));
  }
  return ran;
}

constexpr const char* kBase = R"({
  "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48,
            "vocab": 61, "max_seq": 16},
  "data": {"train": "tokens made here", "seq_len": 16},
  "batch": {"global": 8},
  "precision": {"compute": "fp64"}})";

engine::RunConfig configuration(const Keys& keys, int64_t ranks,
                                at::Device device) {
  std::vector<config::Override> overrides;
  for (const auto& [key, value] : keys) {
    overrides.push_back({.key = key, .value = value, .flag = key});
  }
  engine::RunConfig config =
      engine::run_config_from_text(kBase, "base", overrides);
  engine::complete(config, ranks);
  config.run.device_types = {device.type()};
  engine::check_device(config);
  return config;
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
  keys.push_back({"batch.micro", "2"});
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

// What each verb gives on rank 0 of three, of this rank's numbers.
std::vector<at::Tensor> verbs(at::Device device) {
  std::vector<at::Tensor> given;
  comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
    comm::Group& group = ranks.world();
    const int64_t rank = group.rank(), next = (rank + 1) % 3;
    const at::Tensor mine = (at::arange(6, at::kDouble) + 10 * rank).to(device);
    std::vector<at::Tensor> all(6);
    all[0] = mine.clone();
    group.all_reduce(all[0]).wait();
    all[1] = at::zeros({18}, mine.options());
    group.all_gather(all[1], mine).wait();
    all[2] = at::zeros({2}, mine.options());
    group.reduce_scatter(all[2], mine, comm::ReduceOp::kMean).wait();
    const std::vector<int64_t> to = {2, 2, 2};
    all[3] = at::zeros({6}, mine.options());
    group.all_to_all(all[3], mine, to, to).wait();
    all[4] = mine.clone();
    group.broadcast(all[4], /*root=*/1, comm::Mode::kBlocking).wait();
    all[5] = at::zeros({6}, mine.options());
    comm::Work sent = group.send(mine, next);
    group.recv(all[5], (rank + 2) % 3).wait();
    sent.wait();
    if (rank != 0) return;
    for (const at::Tensor& each : all) {
      EXPECT_EQ(each.device(), mine.device());
      given.push_back(each.cpu());
    }
  });
  return given;
}

TEST(GroupOnADevice, EveryVerbGivesWhatItGivesOnTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const auto here = verbs(at::kCPU), there = verbs(*device());
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(at::equal(there[i], here[i])) << i;
  }
}

// A world of one rank, over NCCL where that is built.
TEST(Nccl, AWorldOfOneRankGoesOverIt) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  comm::run_threads(
      {.backend = "nccl", .devices = {at::kCUDA}},
      [](comm::Communicator& ranks) {
        EXPECT_EQ(ranks.backend(), "nccl+shm");
        comm::Group& group = ranks.world();
        for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
          const at::Tensor x =
              at::arange(6, at::TensorOptions(at::kCUDA).dtype(type));
          const at::Tensor sum = x.clone(), gathered = at::empty_like(x),
                           part = at::empty_like(x), moved = at::empty_like(x);
          comm::Work work = group.all_reduce(sum);
          work.wait();
          group.all_gather(gathered, sum).wait();
          group.reduce_scatter(part, gathered).wait();
          group.all_to_all(moved, part, {6}, {6}).wait();
          group.broadcast(moved, 0, comm::Mode::kBlocking).synchronize();
          EXPECT_TRUE(at::equal(moved, x));
        }
        const at::Tensor mean = at::ones({3}, at::kCUDA);
        group.all_reduce(mean, comm::ReduceOp::kMean).wait();
        const at::Tensor flags = at::ones({3}, at::kCUDA).to(at::kBool);
        group.broadcast(flags, 0).wait();
        const at::Tensor none = at::empty({0}, at::kCUDA);
        group.all_reduce(none).synchronize();
        const at::Tensor here = at::ones({3});
        group.all_reduce(here).wait();
        group.barrier();
        EXPECT_TRUE(at::equal(mean.cpu(), here));
        // Its watch sees within moments what the GPU has done.
        while (group.flight_record().find("pending") != std::string::npos) {
          std::this_thread::yield();
        }
        for (const auto& verb : group.stats()) {
          EXPECT_GE(verb.seconds, 0) << verb.verb;
          EXPECT_LT(verb.seconds, 60) << verb.verb;
        }
      });
}

TEST(Nccl, RanksThatShareAGpuAreRefused) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  if (num_gpus() > 1) GTEST_SKIP() << "needs a GPU that ranks share";
  const auto made = [](const char* backend) {
    std::string found;
    comm::run_threads({.backend = backend,
                       .world_size = 2,
                       .local_world_size = 2,
                       .devices = {at::kCUDA, at::kCUDA}},
                      [&](comm::Communicator& ranks) {
                        if (ranks.rank() == 0) found = ranks.backend();
                      });
    return found;
  };
  try {
    made("nccl");
    ADD_FAILURE() << "was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr("ranks 0 and 1 share GPU-"));
  }
  EXPECT_EQ(made("auto"), "shm");
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

// Losses by step of a run that stops behind `steps` of four.
std::vector<double> train(const TemporaryFolder& folder, const Keys& more,
                          int64_t steps, at::Device device) {
  const std::string file = folder.file("tokens");
  const std::string place = folder.path().string();
  Keys keys = {{"data.train", file.c_str()},
               {"data.valid", file.c_str()},
               {"data.format", "tokens_u16"},
               {"run.dir", place.c_str()},
               {"run.steps", "4"},
               {"checkpoint.every", "2"},
               {"monitor.tensorboard", "false"}};
  keys.insert(keys.end(), more.begin(), more.end());
  const auto config = configuration(keys, /*ranks=*/2, device);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    const monitor::DeviceMemory there;
    int64_t polls = 0;
    train::train(config, ranks,
                 {.stop_requested = [&] { return ++polls >= steps; }});
  });
  std::vector<double> losses;
  std::istringstream lines(
      read_file(train::RunFolder(config).path() + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto values = tessera::detail::parse_json(line, "metrics");
    for (const char* name : {"loss", "valid_loss"}) {
      if (values.contains(name)) losses.push_back(values[name]);
    }
  }
  return losses;
}

void with_tokens(const TemporaryFolder& folder) {
  std::vector<uint16_t> tokens(4000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = i * i % 61;
  write_file_atomic(folder.file("tokens"),
                    std::string(reinterpret_cast<const char*>(tokens.data()),
                                2 * tokens.size()));
}

// What the states take, by kind; and that nothing is left of it.
TEST(MemoryOfADevice, IsBookedAsTheCpusIs) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  monitor::count_tensor_bytes();
  using Bytes = std::vector<int64_t>;
  const auto held = [] {
    Bytes bytes;
    for (const auto kind : {MemoryKind::kParameters, MemoryKind::kGradients,
                            MemoryKind::kOptimizer}) {
      bytes.push_back(monitor::tensor_bytes(kind).now);
    }
    return bytes;
  };
  for (const auto& [stage, offload] : {std::pair{"0", "none"},
                                       {"1", "none"},
                                       {"3", "none"},
                                       {"3", "optimizer"}}) {
    const auto states = [&, stage = stage,
                         offload = offload](at::Device device) {
      const auto config = configuration(
          {{"mesh.dp", "2"}, {"zero.stage", stage}, {"zero.offload", offload}},
          2, device);
      Bytes bytes;
      comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
        const monitor::RankMemory memory;
        const monitor::DeviceMemory there;
        {
          engine::RankModel model(config, ranks);
          step(model, config, 0);
          if (ranks.rank() == 0) bytes = held();
          EXPECT_GT(monitor::tensor_bytes(MemoryKind::kWork).peak, 0);
        }
        EXPECT_EQ(held(), Bytes({0, 0, 0}));
      });
      return bytes;
    };
    // CUDA's allocator gives whole parts of 512 bytes.
    const int64_t rounding = at::hasCUDA() ? 16 * 512 : 0;
    const Bytes there = states(*device()), here = states(at::kCPU);
    for (size_t kind = 0; kind < here.size(); ++kind) {
      EXPECT_GE(there[kind], here[kind]) << "zero.stage " << stage << offload;
      EXPECT_LE(there[kind], here[kind] + rounding)
          << "zero.stage " << stage << offload;
    }
  }
}

// Scores are most of it. On a GPU, whose loops make masks in their place.
TEST(MemoryOfADevice, OfAttentionWithDropoutIsWhatTheFactsSay) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  monitor::count_tensor_bytes();
  const auto config = configuration({{"model.dropout", "0.1"},
                                     {"model.max_seq", "384"},
                                     {"data.seq_len", "384"},
                                     {"precision.compute", "fp32"}},
                                    1, *device());
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    const monitor::DeviceMemory there;
    engine::RankModel model(config, ranks);
    step(model, config, 0);
    const auto found =
        static_cast<double>(monitor::tensor_bytes(MemoryKind::kWork).peak);
    const auto said = static_cast<double>(engine::memory_plan(config).work);
    EXPECT_NEAR(said, found, 0.1 * found);
  });
}

TEST(MemoryOfADevice, WhereThereIsTooLittleItSaysWhatIsHeldAndWhatHelps) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  monitor::count_tensor_bytes();
  const TemporaryFolder folder;
  with_tokens(folder);
  std::string said;
  try {
    testing::limit_test_device(1'300'000);
    train(folder, {{"mesh.dp", "2"}, {"batch.micro", "4"}}, /*steps=*/2,
          *device());
  } catch (const Error& error) {
    said = message_of(error);
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
  }
  testing::limit_test_device(0);
  EXPECT_THAT(
      said,
      ::testing::MatchesRegex(
          ".*memory of the device: the test device is out of memory: [0-9]+ "
          "bytes more. This rank holds .* of parameters, .* of gradients and "
          ".* of the optimizer's states, and had up to .* beside them. Use a "
          "higher zero.stage or a smaller batch.micro or recompute.mode block "
          "or zero.offload optimizer or a device with more memory.*"));
}

// Half of a run on the one, and half on the other: its checkpoints are alike.
TEST(RunOnADevice, TrainsAndGoesOnFromTheOthersCheckpoint) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const TemporaryFolder files = tests::folder_on_disk();
  const std::string folder = files.path().string();
  for (const char* const offload : {"none", "optimizer"}) {
    const Keys zero = {{"mesh.dp", "2"},
                       {"zero.stage", "3"},
                       {"zero.offload", offload},
                       {"zero.offload_folder", folder.c_str()}};
    const TemporaryFolder plain, mixed;
    with_tokens(plain);
    with_tokens(mixed);
    const auto expected = train(plain, zero, /*steps=*/4, at::kCPU);
    Keys late = zero;
    late.push_back({"monitor.losses_late", "1"});
    train(mixed, late, /*steps=*/2, *device());
    const auto found = train(mixed, zero, /*steps=*/4, at::kCPU);
    ASSERT_GE(expected.size(), 4u);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-9) << offload;
    }
  }
}

}  // namespace
}  // namespace tessera
