#include "tessera/engine/step_programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "tessera/engine/rank_model.h"

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

// Four micro-batches of one sample on the first of two stages.
RunConfig run_of_small_batches(int64_t seq_len) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = seq_len;
  config.model.layers = 4;
  config.model.hidden = 512;
  config.model.heads = 8;
  config.model.vocab = 64;
  config.model.max_seq = 256;
  config.mesh.pp = 2;
  config.zero.stage = 0;
  config.batch = {.global = 4, .micro = 1};
  return config;
}

bool splits(RunConfig config, const program::passes::Choice& choice = {}) {
  complete(config, implied_world_size(config));
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
  RunConfig config = run_of_small_batches(/*seq_len=*/128);
  EXPECT_TRUE(splits(config));
  EXPECT_FALSE(splits(config, {.without = {"split_backward"}}));
  EXPECT_FALSE(splits(run_of_small_batches(/*seq_len=*/129)));
  config.mesh.dp_shard = 2;
  config.batch.global = 8;
  for (const int64_t stage : {1, 2, 3}) {
    config.zero.stage = stage;
    EXPECT_EQ(splits(config), stage == 1) << stage;
  }
  config = run_of_small_batches(/*seq_len=*/128);
  config.mesh.pp = 1;
  EXPECT_FALSE(splits(config));
}

}  // namespace
}  // namespace tessera::engine
