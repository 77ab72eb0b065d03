// Steps computed again by ranks: the same bits on every mesh, no trace in the
// run, and samples that a rank reads otherwise in place of a processor that
// computes otherwise.
#include "tessera/train/reruns.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/failure_of_ranks.h"
#include "tests/support/small_steps.h"

namespace tessera::train {
namespace {

using engine::RankModel;
using engine::RunConfig;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kSteps = 3;

struct Mesh {
  const char* name;
  int64_t world;
  std::function<void(RunConfig&)> set;
};

const std::vector<Mesh>& meshes() {
  static const std::vector<Mesh> all = {
      {"one rank", 1, [](RunConfig&) {}},
      {"dp 3, dropout", 3,
       [](RunConfig& c) {
         c.mesh.dp = 3;
         c.model.family = "gpt2";
         c.model.dropout = 0.1;
       }},
      {"dp 3, one reads", 3,
       [](RunConfig& c) { c.mesh.dp = 3, c.data.reader = "first"; }},
      {"zero 2 x pp 2 x cp 2", 8,
       [](RunConfig& c) {
         c.mesh.dp = c.mesh.pp = c.mesh.cp = 2;
         c.zero.stage = 2;
       }},
      {"hybrid 3 x tp 2, a loss scale", 8,
       [](RunConfig& c) {
         c.mesh.dp_replicate = c.mesh.dp_shard = c.mesh.tp = 2;
         c.zero.stage = 3;
         c.precision.loss_scale = 0;
       }},
      {"zero 1 x pp 2, zero bubble", 4,
       [](RunConfig& c) {
         c.mesh.dp = c.mesh.pp = 2;
         c.zero.stage = 1;
         c.pipeline.schedule = "zb_h1";
       }},
      {"offload", 2,
       [](RunConfig& c) {
         c.mesh.dp = 2;
         c.zero.stage = 3;
         c.zero.offload = "all";
       }},
      {"ep 2", 2,
       [](RunConfig& c) {
         c.model.family = "mixtral";
         c.model.moe.experts = 2;
         c.mesh.dp = c.mesh.ep = 2;
       }},
  };
  return all;
}

RunConfig config_of(const Mesh& mesh) {
  RunConfig config = testing::smallest_run();
  mesh.set(config);
  config.batch = {.global = 12, .micro = 1};
  complete(config, mesh.world);
  return config;
}

// Whether a rank reads otherwise: asked before each of its reads of a step that
// is computed again, by how often that was before, from 0.
using Plant = std::function<bool(int64_t rank, int64_t time)>;

engine::StepInput input_of(const RunConfig& config, int64_t step) {
  return engine::step_input(config, step, 1e-3, testing::drawn_batches(config));
}

engine::StepInput planted_in(engine::StepInput input, int64_t rank,
                             const Plant& plants) {
  const auto time = std::make_shared<int64_t>(-1);  // of all copies
  input.read.load = [load = input.read.load, rank, plants, time](
                        int64_t share, int64_t microbatch) {
    if (microbatch == 0) ++*time;
    data::Batch batch = load(share, microbatch);
    if (plants(rank, *time)) batch.targets = at::flip(batch.targets, {1});
    return batch;
  };
  return input;
}

std::vector<double> losses_of(const Mesh& mesh, int64_t every) {
  const RunConfig config = config_of(mesh);
  std::vector<double> losses;
  comm::run_threads(mesh.world, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    Reruns reruns(every, config, model, ranks.world());
    for (int64_t step = 0; step < kSteps; ++step) {
      if (reruns.is_due(step + 1)) {
        reruns.check(step + 1, input_of(config, step));
      }
      model.step(input_of(config, step));
      const at::Tensor loss =
          at::tensor({model.actor().loss_sum(), model.actor().grad_norm()});
      ranks.world().all_reduce(loss).synchronize();
      if (ranks.rank() > 0) continue;
      losses.push_back(loss[0].item<double>());
      losses.push_back(loss[1].item<double>());
    }
  });
  return losses;
}

TEST(Reruns, LeaveNoTraceOnAnyMesh) {
  for (const Mesh& mesh : meshes()) {
    ::testing::internal::CaptureStderr();
    const auto losses = losses_of(mesh, 1);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                Not(HasSubstr("several times")))
        << mesh.name;
    EXPECT_EQ(losses, losses_of(mesh, 0)) << mesh.name;
  }
}

struct Found {
  std::string told, failure;
};

Found found_on(const Mesh& mesh, const Plant& plants) {
  const RunConfig config = config_of(mesh);
  ::testing::internal::CaptureStderr();
  const auto failure =
      testing::failure_of_ranks(mesh.world, [&](comm::Communicator& ranks) {
        RankModel model(config, ranks);
        Reruns reruns(1, config, model, ranks.world());
        reruns.check(40,
                     planted_in(input_of(config, 39), ranks.rank(), plants));
      });
  return {::testing::internal::GetCapturedStderr(), failure};
}

const Mesh kThree = {"dp 3", 3, [](RunConfig& c) { c.mesh.dp = 3; }};
const Mesh kTwo = {"dp 2", 2, [](RunConfig& c) { c.mesh.dp = 2; }};

TEST(Reruns, WhatARankComputesOtherwiseOnceIsTold) {
  for (const int64_t once : {0, 1, 2}) {
    const Found found = found_on(kThree, [&](int64_t rank, int64_t time) {
      return rank == 1 && time == once;
    });
    EXPECT_THAT(found.failure, IsEmpty()) << once;
    EXPECT_THAT(found.told,
                HasSubstr("step 40 was computed several times before its "
                          "update, and by rank 1 (dp_replicate=1) otherwise "
                          "once: a transient error"))
        << once;
  }
  const Found found = found_on(
      kTwo, [](int64_t rank, int64_t time) { return rank == 0 && time == 1; });
  EXPECT_THAT(
      found.told,
      HasSubstr("step 40, computed twice, differs first in the gradient "
                "of 'final_norm.weight', behind micro-batch 0"));
}

TEST(Reruns, WhatARankAlwaysComputesOtherwiseEndsTheRun) {
  const auto always = [](int64_t rank, int64_t) { return rank == 1; };
  EXPECT_THAT(found_on(kThree, always).failure,
              AllOf(HasSubstr("by rank 1 (dp_replicate=1) otherwise again: a "
                              "processor or memory there fails"),
                    HasSubstr("Leave that host out")));
  EXPECT_THAT(found_on(kTwo, always).failure,
              HasSubstr("by ranks 0 (dp_replicate=0), 1 (dp_replicate=1) "
                        "otherwise again"));
}

// Alone a rank can say no more than that it does not repeat itself.
TEST(Reruns, AloneARankIsComparedWithItself) {
  const Mesh& alone = meshes().front();
  EXPECT_THAT(found_on(alone, [](int64_t, int64_t) { return true; }).failure,
              IsEmpty());
  EXPECT_THAT(
      found_on(alone, [](int64_t, int64_t time) { return time == 2; }).told,
      HasSubstr("by rank 0 otherwise once"));
}

}  // namespace
}  // namespace tessera::train
