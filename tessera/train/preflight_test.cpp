#include "tessera/train/preflight.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::train
