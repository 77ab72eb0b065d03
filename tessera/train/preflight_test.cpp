#include "tessera/train/preflight.h"

#include <gtest/gtest.h>

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
  const auto config = testing::small_run(/*ranks=*/4, /*zero_stage=*/3);
  const auto memory = engine::memory_plan(config);
  EXPECT_NE(describe_plan(config).find(
                "memory      " + bytes_text(memory.states) +
                " of model states and at most " + bytes_text(memory.work) +
                " of activations on the fullest rank\n"),
            std::string::npos);
}

// Devices around device 0 hold what ranks of plain data parallelism do.
TEST(Preflight, ThePlanOfDevicesOfOneProcess) {
  auto config = testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
  const auto ranks = engine::memory_plan(config);
  config.mesh.data_parallel = "dp";
  const auto devices = engine::memory_plan(config);
  EXPECT_EQ(devices.states, ranks.states);
  EXPECT_EQ(devices.work, ranks.work);
  EXPECT_NO_THROW(describe_plan(config));
}

}  // namespace
}  // namespace tessera::train
