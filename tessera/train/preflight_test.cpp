#include "tessera/train/preflight.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/units.h"
#include "tessera/engine/memory_plan.h"
#include "tests/support/small_run.h"

namespace tessera::train {
namespace {

TEST(Preflight, ThePlanTellsWhichRanksHoldWhichExperts) {
  for (const auto& layout : testing::kExpertLayouts) {
    const std::string plan = describe_plan(testing::run_of_experts(layout));
    EXPECT_NE(plan.find(std::string("\n") + layout.groups + "batch"),
              std::string::npos)
        << plan;
  }
}

TEST(Preflight, ThePlanTellsWhatTheFullestRankHolds) {
  auto config = testing::small_run(/*ranks=*/4, /*zero_stage=*/3);
  config.zero.prefetch = 1;
  const auto memory = engine::memory_plan(config);
  EXPECT_NE(describe_plan(config).find(
                "memory      " + bytes_text(memory.states) +
                " of model states and at most " + bytes_text(memory.work) +
                " of activations on the fullest rank\n"),
            std::string::npos);
}

// Devices around device 0 hold what ranks of plain data parallelism do, with
// one optimizer.
TEST(Preflight, ThePlanOfDevicesOfOneProcess) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  const auto ranks = engine::memory_plan(config);
  config.mesh.data_parallel = "dp";
  const auto devices = engine::memory_plan(config);
  EXPECT_EQ(devices.states, 2 * ranks.states - ranks.optimizer);
  EXPECT_EQ(devices.work, 2 * ranks.work);
  EXPECT_NO_THROW(describe_plan(config));
}

// What a check of this host's memory says; "": nothing.
std::string complaint(const engine::RunConfig& config, int64_t host_bytes,
                      program::Purpose purpose = program::Purpose::kTraining) {
  try {
    const bool devices = config.mesh.star();
    check_memory(config, {.count = devices ? 1 : implied_world_size(config)},
                 host_bytes, purpose);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }
  return "";
}

TEST(Preflight, ThePrefetchThatFitsIsNamed) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/3);
  const auto host_bytes_of = [&](int64_t prefetch) {
    config.zero.prefetch = prefetch;
    return 2 * engine::memory_plan(config).total();
  };
  for (const int64_t fitting : {0, 1, 2, 3}) {
    const int64_t host_bytes = host_bytes_of(fitting);
    EXPECT_EQ(complaint(config, host_bytes), "");
    EXPECT_LT(host_bytes, host_bytes_of(fitting + 1));
    for (const int64_t more : {int64_t{4}, int64_t{1} << 20}) {
      config.zero.prefetch = more;
      const std::string said = complaint(config, host_bytes);
      EXPECT_NE(said.find(c10::str("zero.prefetch is ", more)),
                std::string::npos)
          << said;
      EXPECT_NE(said.find(c10::str("Nearest: ", fitting, ".")),
                std::string::npos)
          << said;
    }
  }
}

TEST(Preflight, WhatFitsWithNoPrefetchIsRefused) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/3);
  config.zero.prefetch = 0;
  const int64_t bytes = engine::memory_plan(config).total();
  EXPECT_EQ(complaint(config, 2 * bytes), "");
  EXPECT_EQ(complaint(config, /*host_bytes=*/0), "");  // not known
  config.zero.prefetch = 3;
  EXPECT_NE(complaint(config, 2 * bytes - 1).find("memory: the ranks of"),
            std::string::npos);
}

// It holds no gradients and no optimizer.
TEST(Preflight, AnEvaluationNeedsLess) {
  const auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  const auto purpose = program::Purpose::kEvaluation;
  const int64_t bytes = engine::memory_plans(config, purpose).front().total();
  EXPECT_LT(3 * bytes, engine::memory_plan(config).total());
  EXPECT_EQ(complaint(config, 2 * bytes, purpose), "");
  EXPECT_NE(complaint(config, 2 * bytes - 1, purpose).find("--dtype bf16"),
            std::string::npos);
}

TEST(Preflight, DevicesOfOneProcessAreItsOneRank) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  config.mesh.data_parallel = "dp";
  const int64_t bytes = engine::memory_plan(config).total();
  EXPECT_EQ(complaint(config, bytes), "");
  EXPECT_NE(complaint(config, bytes - 1), "");
}

// Not the fullest for each: stages hold less and less.
TEST(Preflight, StagesOfAHostAreAddedUp) {
  auto config = testing::small_run(/*ranks=*/1, /*zero_stage=*/0);
  config.mesh = {};
  config.mesh.pp = 2;
  config.batch = {.global = 4, .micro = 1};
  complete(config, 2);
  int64_t sum = 0;
  for (const auto& stage : engine::memory_plans(config)) sum += stage.total();
  EXPECT_LT(sum, 2 * engine::memory_plan(config).total());
  EXPECT_EQ(complaint(config, sum), "");
  EXPECT_NE(complaint(config, sum - 1), "");
}

// Ranks that hold the same write, and copy, a part of it each or none.
TEST(Preflight, CopiesOfACheckpointAreCounted) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  const int64_t bytes = 2 * engine::memory_plan(config).total();
  const int64_t copies = checkpoint_bytes(config);
  config.checkpoint.async = true;
  EXPECT_EQ(engine::memory_plan(config).copies, copies);
  EXPECT_EQ(complaint(config, bytes + copies), "");
  const std::string said = complaint(config, bytes + copies - 1);
  EXPECT_NE(said.find(" copied for each checkpoint"), std::string::npos)
      << said;
  EXPECT_NE(said.find("checkpoint.async false"), std::string::npos) << said;

  config.run.device_types = {c10::kCUDA};
  EXPECT_EQ(complaint(config, copies), "");
  EXPECT_NE(complaint(config, copies - 1), "");
  config.checkpoint.every = 0;
  EXPECT_EQ(complaint(config, 1), "");
}

// Two of them while the second is written; what another host's ranks save too.
TEST(Preflight, CheckpointsInMemoryAreCounted) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/3);
  config.checkpoint.local_every = 10;
  const int64_t saved = checkpoint_bytes(config);
  EXPECT_EQ(local_checkpoint_bytes(config, {.first = 0, .count = 2}),
            2 * saved);
  EXPECT_EQ(local_checkpoint_bytes(config, {.first = 1, .count = 1}),
            4 * engine::memory_plan(config).saved);

  config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  config.checkpoint.local_every = 10;
  EXPECT_EQ(local_checkpoint_bytes(config, {.first = 1, .count = 1}),
            4 * saved);

  for (const std::string folder : {"/dev/shm", "."}) {
    config.checkpoint.local_dir = folder;
    const int64_t kept = lies_in_memory(folder) ? 2 * saved : 0;
    const int64_t bytes = 2 * engine::memory_plan(config).total() + kept;
    EXPECT_EQ(complaint(config, bytes), "") << folder;
    const std::string said = complaint(config, bytes - 1);
    EXPECT_EQ(said.find(" in " + folder) != said.npos, kept > 0) << said;
    EXPECT_EQ(said.find("checkpoint.local_every 0") != said.npos, kept > 0);
  }
}

// The second host of two has no reader, and needs no files.
TEST(Preflight, FilesAreNeededWhereTheyAreRead) {
  const TemporaryFolder runs("tessera-preflight");
  auto config = testing::small_run(/*ranks=*/4, /*zero_stage=*/0);
  config.mesh = {.pp = 2, .dp = 2};
  config.run.dir = runs.path();
  config.data.train = {"/nowhere/train.txt"};
  config.data.reader = "first";
  complete(config, 4);
  const auto refusal = [&](int64_t first) {
    try {
      preflight(config, {.first = first, .count = 2}, "never");
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      return message_of(error);
    }
    return std::string();
  };
  EXPECT_EQ(refusal(2), "");
  const std::string message = refusal(0);
  EXPECT_NE(message.find("data.reader is first, and rank 0 on "), message.npos)
      << message;
  EXPECT_NE(message.find("'/nowhere/train.txt' does not exist"), message.npos);
  EXPECT_NE(message.find("Put the files there too"), message.npos);
  config.data.reader = "every";
  EXPECT_NE(refusal(2).find("data.train: '/nowhere/train.txt'"), message.npos);
}

}  // namespace
}  // namespace tessera::train
