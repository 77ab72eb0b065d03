// Training with states in files, beside the same with all of them in memory.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "tessera/core/files.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_model.h"
#include "tessera/monitor/memory.h"
#include "tests/support/disk.h"
#include "tests/support/memory_cases.h"

namespace tessera::engine {
namespace {

constexpr int64_t kSteps = 3;

data::Batch batch_of(int64_t step, int64_t first, int64_t count) {
  const at::Tensor ids =
      (at::arange(count * kSeqLen) * 7 + 131 * step + 17 * first)
          .remainder(kVocab)
          .view({count, kSeqLen});
  return {ids, ids.roll(-1, 1)};
}

// Every rank's weights and states, name by name, behind the steps.
std::map<std::string, at::Tensor> trained(const RunConfig& config) {
  std::map<std::string, at::Tensor> all;
  std::mutex mutex;
  comm::run_threads(
      implied_world_size(config), "shm", [&](comm::Communicator& ranks) {
        RankModel model(config, ranks);
        for (int64_t step = 0; step < kSteps; ++step) {
          model.step(step_input(config, step, config.optimizer.lr,
                                [&](int64_t of, int64_t first, int64_t count) {
                                  return batch_of(of, first, count);
                                }));
        }
        model.gather_parameters();
        const std::string rank = c10::str(ranks.rank(), " ");
        const std::scoped_lock lock(mutex);
        for (const auto& each : model.composed().parameters->parameters()) {
          all[rank + each.name] = each.shard.clone();
        }
        for (const auto& each : model.optimizer().state()) {
          all[rank + each.name] = each.tensor.clone();
        }
      });
  return all;
}

class OffloadOn : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(OffloadOn, ChangesNoBit) {
  const TemporaryFolder folder = tests::folder_on_disk();
  RunConfig config = memory_run(GetParam());
  config.optimizer.lr = 0.01;
  const auto expected = trained(config);
  config.zero.offload_folder = folder.path();
  for (const char* const offload : {"optimizer", "all"}) {
    config.zero.offload = offload;
    const auto found = trained(config);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [name, tensor] : expected) {
      EXPECT_TRUE(at::equal(found.at(name), tensor)) << offload << ": " << name;
    }
  }
}

std::vector<MemoryCase> meshes() {
  return {
      {"one rank"},
      {"accumulation", {}, [](RunConfig&) {}, 2},
      {"zero 0", {.dp_replicate = 2}},
      {"zero 1", {.dp_shard = 2}, zero(1)},
      {"zero 2", {.dp_shard = 2}, zero(2), 2},
      {"zero 3", {.dp_shard = 2}, zero(3), 2},
      {"zero 3 kept", {.dp_shard = 2}, zero(3, /*reshard=*/false)},
      {"hybrid", {.dp_replicate = 2, .dp_shard = 2}, zero(3)},
      // One rank, which then gathers what it has in its file.
      {"alone zero 3", {}, zero(3)},
      {"alone kept", {}, zero(3, /*reshard=*/false)},
      {"alone wide", {}, also(zero(3), wide)},
      {"alone bf16 averages", {}, also(zero(3), also(type("bf16"), averages))},
      {"alone adapters", {}, also(zero(3), adapters())},
      {"alone muon", {}, also(zero(3), muon)},
      {"replicas zero 3", {.dp_replicate = 2}, zero(3)},
      {"stages zero 3", {.pp = 2}, also(zero(3), schedule("1f1b"))},
      {"tp", {.tp = 2}, sequence},
      {"pp", {.pp = 2}, schedule("1f1b"), 2},
      {"pp tied",
       {.pp = 2},
       [](RunConfig& config) { config.model.tie_embeddings = true; },
       2},
      {"bf16", {.dp_shard = 2}, also(zero(2), type("bf16"))},
      {"bf16 zero 3", {.dp_shard = 2}, also(zero(3), type("bf16"))},
      {"bf16 states", {.dp_shard = 2}, also(zero(1), bf16_states)},
      {"averages", {.dp_shard = 2}, also(zero(1), averages)},
      {"muon", {.dp_shard = 2}, also(zero(2), muon)},
      {"lion", {}, [](RunConfig& config) { config.optimizer.type = "lion"; }},
      {"sgd", {}, [](RunConfig& config) { config.optimizer.type = "sgd"; }},
      {"adapters", {.dp_shard = 2}, also(zero(3), adapters())},
      {"block", {.dp_shard = 2}, also(zero(3), recompute(1))},
  };
}

INSTANTIATE_TEST_SUITE_P(Meshes, OffloadOn, ::testing::ValuesIn(meshes()),
                         [](const auto& each) {
                           std::string name = each.param.name;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

// Between steps nothing of them is in memory; within one, what two units have,
// as the system counts pages.
TEST(Offload, WhatIsResidentIsWhatTheFactsSay) {
  const TemporaryFolder folder = tests::folder_on_disk();
  RunConfig config = memory_run({"", {}, [](RunConfig& of) {
                                   of.model.hidden = 256;
                                   of.zero.offload = "optimizer";
                                 }});
  config.zero.offload_folder = folder.path();
  monitor::count_tensor_bytes();
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    RankModel model(config, ranks);
    const auto facts = facts_of(config, model.mesh(), mesh::Coord());
    const auto states_of = [&](int64_t unit) {
      int64_t bytes = 0;
      for (const auto& each : facts.units.at(unit).parameters) {
        bytes += each.optimizer_bytes;
      }
      return bytes;
    };
    // Pages are whole, and each core of a busy system may hold on to a batch of
    // 15 that are on their way: the states of a block are more than 500.
    const auto is_near = [](int64_t found, int64_t said) {
      return std::abs(found - said) <= said / 20 + int64_t{2} * 15 * 4096;
    };
    EXPECT_PRED2(is_near, model.files()->bytes(), memory_plan(config).in_files);
    EXPECT_LT(monitor::tensor_bytes(MemoryKind::kOptimizer).now, 64);
    const auto step = [&](const program::Observer& observer) {
      model.step(step_input(config, /*step=*/0, /*lr=*/1e-3,
                            [](int64_t of, int64_t first, int64_t count) {
                              return batch_of(of, first, count);
                            }),
                 observer);
    };
    step(nullptr);
    model.release_files();
    EXPECT_LE(model.files()->resident_bytes(),
              0.05 * static_cast<double>(model.files()->bytes()));
    const auto owners = model.composed().units.owners();
    size_t updated = 0;
    step([&](const program::Instruction& done, double, double) {
      if (done.op != program::Op::kOptimizerStep) return;
      EXPECT_EQ(done.unit, owners.at(updated));
      const bool is_last = ++updated == owners.size();
      const int64_t said =
          states_of(done.unit) + (is_last ? 0 : states_of(owners[updated]));
      // The next one comes meanwhile, and what was released goes before it.
      model.files()->await_all();
      EXPECT_PRED2(is_near, model.files()->resident_bytes(), said);
    });
    EXPECT_EQ(updated, owners.size());
    EXPECT_EQ(monitor::tensor_bytes(MemoryKind::kMapped).now, 0);
  });
}

}  // namespace
}  // namespace tessera::engine
