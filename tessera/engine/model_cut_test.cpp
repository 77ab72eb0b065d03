#include "tessera/engine/model_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "tessera/core/error.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/measured_speeds.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/engine/step_plan.h"

namespace tessera::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

RunConfig small() {
  RunConfig config;
  config.model = {.family = "llama",
                  .layers = 6,
                  .hidden = 16,
                  .heads = 2,
                  .kv_heads = 2,
                  .ffn = 32,
                  .vocab = 64,
                  .max_seq = 16};
  config.data.train = {"any text"};
  config.data.seq_len = 16;
  config.batch = {.global = 16, .micro = 2};
  return config;
}

RunConfig completed(RunConfig config) {
  complete(config, implied_world_size(config));
  return config;
}

std::string refusal(const RunConfig& config) {
  try {
    completed(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
  return "";
}

RunConfig on_stages(std::vector<double> speeds) {
  RunConfig config = small();
  config.mesh.pp = std::ssize(speeds);
  config.mesh.speeds = std::move(speeds);
  return config;
}

RunConfig on_data_ranks(std::vector<double> speeds) {
  RunConfig config = small();
  config.mesh.dp_replicate = std::ssize(speeds);
  config.mesh.speeds = std::move(speeds);
  return config;
}

TEST(ModelCut, EvenUnlessAskedOtherwise) {
  RunConfig config = small();
  config.mesh.pp = 2;
  EXPECT_TRUE(completed(config).pipeline.split.empty());
  EXPECT_EQ(split_text(completed(config)), "layers 3, 3 evenly");
  EXPECT_TRUE(completed(on_stages({2, 2})).pipeline.split.empty());
  EXPECT_TRUE(completed(on_data_ranks({2, 2})).batch.rows.empty());
}

TEST(ModelCut, ByFactsTheHeadCounts) {
  RunConfig config = small();
  config.model.vocab = 1024;  // whose head costs as much as some layers
  config.mesh.pp = 2;
  config.pipeline.cut = "facts";
  const auto cut = completed(config);
  EXPECT_GT(cut.pipeline.split.at(0), cut.pipeline.split.at(1));
  EXPECT_THAT(split_text(cut), HasSubstr(" by facts"));
  EXPECT_LT(plan_step(cut, {}).step, [&] {
    config.pipeline.cut = "layers";
    return plan_step(completed(config), {}).step;
  }());
}

TEST(ModelCut, LayersLeaveSlowStages) {
  EXPECT_THAT(completed(on_stages({1, 0.5})).pipeline.split, ElementsAre(4, 2));
  EXPECT_THAT(completed(on_stages({1, 0.5, 1})).pipeline.split,
              ElementsAre(3, 1, 2));
  EXPECT_EQ(split_text(completed(on_stages({1, 0.5}))),
            "layers 4, 2 by layers and mesh.speeds");
  // Completed once more for other speeds, they are other ones.
  RunConfig again = completed(on_stages({1, 0.5}));
  again.mesh.speeds = {0.5, 1};
  EXPECT_THAT(completed(again).pipeline.split, ElementsAre(2, 4));
  again.mesh.speeds = {};
  EXPECT_TRUE(completed(again).pipeline.split.empty());
}

TEST(ModelCut, AGivenSplitWins) {
  RunConfig config = on_stages({1, 0.5});
  config.pipeline.split = {1, 5};
  const auto cut = completed(config);
  EXPECT_THAT(cut.pipeline.split, ElementsAre(1, 5));
  EXPECT_EQ(split_text(cut), "layers 1, 5 as pipeline.split says");
  EXPECT_THAT(idle_cuts(cut),
              ElementsAre(HasSubstr("mesh.speeds changes nothing: ")));
}

// As a run's config.json has both.
TEST(ModelCut, ASplitThatSpeedsLedToIsNoIdleOne) {
  RunConfig kept = completed(on_stages({1, 0.5}));
  kept.pipeline.is_split_chosen = false;
  const auto again = completed(kept);
  EXPECT_EQ(again.pipeline.split, kept.pipeline.split);
  EXPECT_TRUE(idle_cuts(again).empty());
}

// Of a cut by facts both say what layers cost.
TEST(ModelCut, ARunsConfigurationLeadsToItsShares) {
  RunConfig config = small();
  config.run.device = "cpu";
  config.model.layers = 4;
  config.model.hidden = 64;
  config.model.heads = config.model.kv_heads = 8;
  config.model.ffn = 64;
  config.model.vocab = 1024;
  config.data.seq_len = 4;
  config.batch = {.global = 50, .micro = 5};
  config.mesh.pp = config.mesh.dp_replicate = 2;
  config.mesh.speeds = {1, 0.5, 0.8, 1};
  config.pipeline.cut = "facts";
  const RunConfig first = completed(config);
  ASSERT_THAT(first.pipeline.split, ElementsAre(2, 2));
  ASSERT_THAT(first.batch.rows, ElementsAre(4, 6));
  config.pipeline.split = first.pipeline.split;
  EXPECT_EQ(completed(config).batch.rows, first.batch.rows);
  EXPECT_TRUE(idle_cuts(completed(config)).empty());
  // As good as is known where the run that it was cut by is gone.
  config.pipeline.cut = "a folder that is not there";
  EXPECT_EQ(completed(config).batch.rows, first.batch.rows);
  EXPECT_THAT(idle_cuts(completed(config)),
              ElementsAre(HasSubstr("pipeline.cut is not used")));
}

TEST(ModelCut, AGivenSplitIsSaidToLeaveMeasuringNothing) {
  RunConfig config = small();
  config.mesh.pp = 2;
  config.mesh.measure_speeds = true;
  EXPECT_TRUE(idle_cuts(completed(config)).empty());
  config.pipeline.split = {1, 5};
  EXPECT_THAT(idle_cuts(completed(config)),
              ElementsAre(HasSubstr("mesh.measure_speeds moves no layers")));
}

TEST(ModelCut, SamplesLeaveSlowRanks) {
  EXPECT_THAT(completed(on_data_ranks({1, 0.5})).batch.rows, ElementsAre(3, 1));
  EXPECT_THAT(completed(on_data_ranks({1, 0.001})).batch.rows,
              ElementsAre(3, 1));
  RunConfig one = on_data_ranks({1, 0.5});
  one.batch.micro = 1;
  EXPECT_TRUE(completed(one).batch.rows.empty());
  EXPECT_THAT(idle_cuts(completed(one)),
              ElementsAre(HasSubstr("of batch.micro 1 x 2 samples")));
}

TEST(ModelCut, SamplesThatRanksDoNotDivideAreSharedOut) {
  RunConfig config = small();
  config.mesh.dp_replicate = 3;
  config.batch = {.global = 8, .uneven = true};
  EXPECT_THAT(completed(config).batch.rows, ElementsAre(3, 3, 2));
  EXPECT_EQ(shares_text(completed(config)),
            "3, 3, 2 samples of a micro-batch on the data-parallel ranks, by "
            "batch.uneven");
  // Completed once more on other ranks.
  config = completed(config);
  config.mesh.dp_replicate = 2;
  config.batch.micro = 0;
  EXPECT_TRUE(completed(config).batch.rows.empty());
  config.batch = {.global = 10, .micro = 2, .uneven = true};
  config.mesh.dp_replicate = 3;
  config.mesh.speeds = {0.2, 1, 1};
  EXPECT_THAT(completed(config).batch.rows, ElementsAre(1, 2, 2));
  EXPECT_THAT(shares_text(completed(config)),
              HasSubstr("by mesh.speeds and batch.uneven"));
}

// Layers move by the slowest rank of a stage; what is left is for samples.
TEST(ModelCut, LayersFirstThenSamples) {
  RunConfig config = small();
  config.mesh.pp = config.mesh.dp_replicate = 2;
  config.mesh.speeds = {1, 1, 0.5, 0.5};  // the second stage
  auto cut = completed(config);
  EXPECT_THAT(cut.pipeline.split, ElementsAre(4, 2));
  EXPECT_TRUE(cut.batch.rows.empty());
  config.mesh.speeds = {1, 0.5, 1, 0.5};  // the second data-parallel rank
  cut = completed(config);
  EXPECT_TRUE(!cut.pipeline.is_split_chosen);
  EXPECT_THAT(cut.batch.rows, ElementsAre(3, 1));
}

TEST(ModelCut, StepsAreShorter) {
  for (const auto& config :
       {on_stages({1, 0.5}), on_data_ranks({1, 0.5}), on_stages({0.5, 1, 1})}) {
    const auto uneven = completed(config);
    RunConfig even = uneven;
    even.pipeline.split.clear();
    even.batch.rows.clear();
    EXPECT_LT(plan_step(uneven, {}).step, 0.85 * plan_step(even, {}).step);
  }
}

TEST(ModelCut, RefusedByName) {
  EXPECT_EQ(refusal([] {
              auto config = on_stages({1, 0.5});
              config.mesh.pp = 3;
              return config;
            }()),
            "mesh.speeds has 2 numbers, but the world has 3 ranks: it has one "
            "for each. Give 3, or leave it out where all are alike.");
  RunConfig star = small();
  star.mesh.data_parallel = "dp";
  star.mesh.dp = 2;
  star.mesh.measure_speeds = true;
  EXPECT_THAT(refusal(star), HasSubstr("mesh.measure_speeds is true, but with "
                                       "mesh.data_parallel dp"));
  RunConfig config = small();
  config.mesh.pp = 2;
  config.pipeline.cut = "fact";
  EXPECT_THAT(refusal(config), HasSubstr("Did you mean \"facts\"?"));
}

// The most that anybody has over his speed, of all ways to share out.
double least_of_all(int64_t total, const std::vector<double>& speeds,
                    size_t from = 0) {
  if (from + 1 == speeds.size()) {
    return static_cast<double>(total) / speeds[from];
  }
  double least = std::numeric_limits<double>::infinity();
  const auto others = std::ssize(speeds) - static_cast<int64_t>(from) - 1;
  for (int64_t own = 1; own + others <= total; ++own) {
    least =
        std::min(least, std::max(static_cast<double>(own) / speeds[from],
                                 least_of_all(total - own, speeds, from + 1)));
  }
  return least;
}

TEST(SharesBySpeed, NobodyCouldBeDoneEarlier) {
  for (const std::vector<double>& speeds : {std::vector<double>{1, 1},
                                            {1, 0.5},
                                            {0.3, 1, 0.7},
                                            {1, 0.01, 0.01},
                                            {5, 3, 2, 1}}) {
    for (int64_t total = std::ssize(speeds); total < 14; ++total) {
      const auto shares = shares_by_speed(total, speeds);
      EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), int64_t{0}),
                total);
      double most = 0;
      for (size_t i = 0; i < shares.size(); ++i) {
        EXPECT_GE(shares[i], 1);
        most = std::max(most, static_cast<double>(shares[i]) / speeds[i]);
      }
      EXPECT_DOUBLE_EQ(most, least_of_all(total, speeds));
    }
  }
  // Both ways end at 6: the slow one has fewer.
  EXPECT_THAT(shares_by_speed(8, {1, 0.5}), ElementsAre(6, 2));
  EXPECT_THAT(shares_by_speed(1'000'000'000, {3, 1}),
              ElementsAre(750'000'000, 250'000'000));
}

TEST(SampleShares, EverySampleOnce) {
  for (const RunConfig& config :
       {completed(on_data_ranks({1, 0.5})), completed(on_data_ranks({1, 1}))}) {
    const SampleShares shares(config);
    std::set<int64_t> samples;
    for (int64_t share = 0; share < 2; ++share) {
      for (int64_t m = 0; m < accumulation(config); ++m) {
        const SampleRun run = shares.of(share, m);
        EXPECT_EQ(run.count, shares.rows_of(share));
        for (int64_t i = 0; i < run.count; ++i) {
          EXPECT_TRUE(samples.insert(run.first + i).second);
        }
      }
    }
    EXPECT_EQ(*samples.rbegin(), config.batch.global - 1);
    EXPECT_EQ(std::ssize(samples), config.batch.global);
  }
}

TEST(SampleShares, MemoryIsOfTheRankWithTheMost) {
  const auto uneven = completed(on_data_ranks({0.5, 1}));
  RunConfig more = completed(on_data_ranks({1, 1}));
  EXPECT_GT(memory_plan(uneven).work, memory_plan(more).work);
  more.batch.micro = 3;
  more.batch.global = 24;  // as many micro-batches
  EXPECT_EQ(memory_plan(uneven).work, memory_plan(more).work);
}

// Rows of the rank with fewer samples wait for those of its next micro-batches.
TEST(SampleShares, APlanHoldsWhatTheFullestRankDoes) {
  RunConfig config = on_data_ranks({1, 0.8});
  config.run.device = "cpu";
  config.model = {.family = "llama", .layers = 4, .hidden = 64, .heads = 8};
  config.model.ffn = config.model.vocab = 64;
  config.model.max_seq = 16;
  config.data.seq_len = 4;
  config.batch = {.global = 50, .micro = 5};
  config = completed(config);
  ASSERT_THAT(config.batch.rows, ElementsAre(6, 4));
  const auto plan = plan_step(config, {});
  const auto& stage = plan.stages.at(0);
  EXPECT_GT(stage.peak_bytes, stage.state_bytes + stage.memory.peak());
  EXPECT_EQ(stage.peak_bytes, memory_plan(config).on_device());
}

TEST(MeasuredSpeeds, NoiseIsNoSpeed) {
  EXPECT_TRUE(rounded_speeds({100, 92, 97}).empty());
  EXPECT_THAT(rounded_speeds({100, 52}), ElementsAre(1, 0.5));
  EXPECT_THAT(rounded_speeds({96, 1, 47, 100}), ElementsAre(1, 0.1, 0.5, 1));
}

TEST(MeasuredSpeeds, AreTheSameOnAllRanks) {
  std::vector<std::vector<double>> speeds(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    speeds.at(ranks.rank()) = measured_speeds(ranks);
  });
  EXPECT_EQ(speeds[0], speeds[1]);
}

}  // namespace
}  // namespace tessera::engine
