#include "tessera/engine/step_programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "tessera/engine/rank_model.h"
#include "tests/support/memory_cases.h"

namespace tessera::engine {
namespace {

// 8 tp x 8 pp x 64 dp, experts among dp.
RunConfig run_of_thousands(int64_t zero_stage) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = 1024;
  config.model.family = "mixtral";
  config.model.layers = 32;
  config.model.hidden = 1024;
  config.model.heads = 16;
  config.model.kv_heads = 8;
  config.model.ffn = 4096;
  config.model.vocab = 32000;
  config.model.max_seq = 1024;
  config.model.moe.experts = 64;
  config.mesh = {.pp = 8, .dp = 64, .tp = 8, .ep = 64};
  config.zero.stage = zero_stage;
  config.tensor.sequence_parallel = true;
  config.batch = {.global = 1024, .micro = 1};
  complete(config, implied_world_size(config));
  return config;
}

TEST(StepPrograms, WholeStepsOfFourThousandRanksAreProved) {
  for (const int64_t zero_stage : {1, 3}) {
    const auto start = std::chrono::steady_clock::now();
    const RunConfig config = run_of_thousands(zero_stage);
    const auto mesh = config.mesh.mesh(4096, zero_stage);
    const auto model = models::make_model(config.model);
    parallel::place(*model, mesh, config);
    const auto units = parallel::model_units(*model, mesh, config);
    const auto programs = proved_programs(
        config, mesh, units, 4095,
        {program::Purpose::kEvaluation, program::Purpose::kTraining});
    const std::chrono::duration<double> passed =
        std::chrono::steady_clock::now() - start;
    EXPECT_GT(programs.step.alone.size(), 300U);
    std::printf("ZeRO stage %d: %.2f s\n", static_cast<int>(zero_stage),
                passed.count());
  }
}

bool splits(const RunConfig& config,
            const program::passes::Choice& choice = {}) {
  const auto mesh =
      config.mesh.mesh(implied_world_size(config), config.zero.stage);
  const auto model = models::make_model(config.model);
  parallel::place(*model, mesh, config);
  const auto units = parallel::model_units(*model, mesh, config);
  const auto program = lowered_program(config, mesh, units, /*stage=*/0,
                                       program::Purpose::kTraining, choice);
  return std::ranges::any_of(program, [](const auto& each) {
    return each.op == program::Op::kBackwardWeight;
  });
}

TEST(StepPrograms, BackwardsOfPipelinesComeInPartsWhereRowsWait) {
  const auto run = [](const mesh::Degrees& degrees, int64_t stage,
                      int64_t seq_len = 128) {
    const Change length = [=](RunConfig& c) { c.data.seq_len = seq_len; };
    return memory_run(
        {"waiting", degrees, also(also(waiting, zero(stage)), length), 2});
  };
  EXPECT_TRUE(splits(run({.pp = 2}, 0)));
  EXPECT_FALSE(splits(run({.pp = 2}, 0), {.without = {"split_backward"}}));
  EXPECT_FALSE(splits(run({.pp = 2}, 0, /*seq_len=*/129)));
  for (const int64_t stage : {1, 2, 3}) {
    EXPECT_EQ(splits(run({.pp = 2, .dp_shard = 2}, stage)), stage == 1)
        << stage;
  }
  EXPECT_FALSE(splits(run({}, 0)));
}

}  // namespace
}  // namespace tessera::engine
