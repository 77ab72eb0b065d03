#include "tessera/engine/memory_plan.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tessera/engine/rank_model.h"
#include "tessera/monitor/memory.h"
#include "tests/support/small_run.h"

namespace tessera::engine {
namespace {

struct Case {
  const char* name;
  int64_t dp = 1, pp = 1, tp = 1;
  int64_t zero_stage = 0, microbatches = 1;
  const char* schedule = "1f1b";
  int64_t recompute = 0;
};

RunConfig run_of(const Case& of) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = 128;
  config.model.layers = 4;
  config.model.hidden = 64;
  config.model.heads = 8;
  config.model.vocab = 512;
  config.run.threads = 1;
  config.mesh.dp = of.dp;
  config.mesh.pp = of.pp;
  config.mesh.tp = of.tp;
  config.zero.stage = of.zero_stage;
  config.zero.prefetch = 1;
  config.pipeline.schedule = of.schedule;
  config.batch.micro = 2;
  config.batch.global = of.dp * of.microbatches * config.batch.micro;
  if (of.recompute > 0) {
    config.recompute.mode = "block";
    config.recompute.every = of.recompute;
  }
  complete(config, of.dp * of.pp * of.tp);
  return config;
}

// The most bytes in tensors of a rank of each stage, in a step.
std::vector<int64_t> peaks(const RunConfig& config) {
  monitor::count_tensor_bytes();
  std::mutex mutex;
  std::vector<int64_t> most(config.mesh.pp);
  comm::run_threads(
      implied_world_size(config), "shm", [&](comm::Communicator& ranks) {
        const monitor::RankMemory memory;
        RankModel model(config, ranks);
        const auto input = step_input(
            config, /*step=*/0, 1e-3, [&](int64_t, int64_t, int64_t count) {
              const at::Tensor ids =
                  at::zeros({count, config.data.seq_len}, at::kLong);
              return data::Batch{ids, ids};
            });
        model.step(input);  // opens what is opened on first use
        monitor::reset_tensor_peak();
        if (model.goes_on()) model.step(input, nullptr, input);
        model.step(input);
        const std::scoped_lock lock(mutex);
        int64_t& stage = most[model.composed().coord[mesh::Axis::kPp]];
        stage = std::max(stage, monitor::tensor_bytes().peak);
      });
  return most;
}

// Without the scratch that oneDNN takes inside of products, which is not
// planned for: of products as small as these it is a large share.
TEST(MemoryPlan, IsWhatRanksNeed) {
  at::globalContext().setUserEnabledMkldnn(false);
  for (const Case& each :
       {Case{.name = "one rank"},
        Case{.name = "accumulation", .microbatches = 3},
        Case{.name = "recomputation", .recompute = 1},
        Case{.name = "every second block", .microbatches = 2, .recompute = 2},
        Case{.name = "zero1", .dp = 2, .zero_stage = 1},
        Case{.name = "zero2", .dp = 2, .zero_stage = 2},
        Case{.name = "zero3", .dp = 4, .zero_stage = 3, .microbatches = 2},
        Case{.name = "tensor", .tp = 2},
        Case{.name = "1f1b", .pp = 2, .microbatches = 4},
        Case{.name = "gpipe", .pp = 2, .microbatches = 4, .schedule = "gpipe"},
        Case{.name = "1f1b of four", .pp = 4, .tp = 2, .microbatches = 6},
        Case{.name = "pipedream",
             .pp = 2,
             .microbatches = 4,
             .schedule = "pipedream_2bw"},
        Case{.name = "pipedream zero 2",
             .dp = 2,
             .pp = 2,
             .zero_stage = 2,
             .microbatches = 4,
             .schedule = "pipedream_2bw"}}) {
    const RunConfig config = run_of(each);
    const auto plans = memory_plans(config);
    const auto found = peaks(config);
    for (int64_t stage = 0; stage < config.mesh.pp; ++stage) {
      const auto said = static_cast<double>(plans.at(stage).total());
      const auto most = static_cast<double>(found[stage]);
      EXPECT_NEAR(said, most, 0.03 * most) << each.name << ", stage " << stage;
    }
  }
  at::globalContext().setUserEnabledMkldnn(true);
}

// Of a bf16 model: weights and AdamW's tensors, fp32 masters among them.
TEST(MemoryPlan, Checkpoint) {
  RunConfig config = run_of({.name = "", .dp = 4, .tp = 2, .zero_stage = 3});
  EXPECT_EQ(checkpoint_bytes(config),
            12 * models::num_parameters(config.model));
  config.precision.compute = "bf16";
  EXPECT_EQ(checkpoint_bytes(config),
            14 * models::num_parameters(config.model));
  config.optimizer.type = "sgd";
  EXPECT_EQ(checkpoint_bytes(config), 6 * models::num_parameters(config.model));
}

// pipedream_2bw saves the weights that the next step still computes with, too.
TEST(MemoryPlan, CheckpointOfTwoVersions) {
  RunConfig config = run_of(
      {.name = "", .pp = 2, .microbatches = 2, .schedule = "pipedream_2bw"});
  config.model.tie_embeddings = false;  // else both stages have it
  EXPECT_EQ(checkpoint_bytes(config),
            16 * models::num_parameters(config.model));
  int64_t saved = 0;
  for (const MemoryPlan& stage : memory_plans(config)) saved += stage.saved;
  EXPECT_EQ(saved, checkpoint_bytes(config));
}

}  // namespace
}  // namespace tessera::engine
