#include "tessera/benchmark/step.h"

#include <gtest/gtest.h>

#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/memory_plan.h"
#include "tests/support/small_run.h"

namespace tessera::benchmark {
namespace {

// The first stage has the embedding and more micro-batches under way, the last
// one the head.
TEST(BenchStep, PlansTheMemoryOfItsOwnStage) {
  engine::RunConfig config = testing::small_run(1, 0);
  config.mesh.pp = 2;
  config.batch = {.global = 2, .micro = 1};
  complete(config, 2);
  std::vector<int64_t> planned(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const StepTimes times = measure_step(config, ranks, /*rounds=*/1);
    planned.at(ranks.rank()) = times.planned_bytes;
  });
  const auto plans = engine::memory_plans(config);
  ASSERT_NE(plans.at(0).on_device(), plans.at(1).on_device());
  EXPECT_EQ(planned.at(0), plans.at(0).on_device());
  EXPECT_EQ(planned.at(1), plans.at(1).on_device());
}

}  // namespace
}  // namespace tessera::benchmark
