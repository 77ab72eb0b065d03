#include "tessera/train/state.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>

#include "tessera/core/files.h"
#include "tessera/engine/rank_model.h"
#include "tessera/mesh/slice.h"
#include "tessera/train/replicas.h"
#include "tessera/verify/random_batch.h"

namespace tessera::train {

using engine::RankModel;
using engine::RunConfig;
using ::testing::HasSubstr;

namespace {

struct Mesh {
  const char* name;
  int64_t world;
  std::function<void(RunConfig&)> set;
};

// Ten for a dense model, and ten for one with experts.
const std::vector<Mesh>& dense_meshes() {
  static const std::vector<Mesh> meshes = {
      {"one rank", 1, [](RunConfig&) {}},
      {"dp 3", 3, [](RunConfig& c) { c.mesh.dp = 3; }},
      {"zero 1", 2, [](RunConfig& c) { c.zero.stage = 1; }},
      {"zero 2 of 6", 6, [](RunConfig& c) { c.zero.stage = 2; }},
      {"zero 3 of 3", 3, [](RunConfig& c) { c.zero.stage = 3; }},
      {"hybrid", 4,
       [](RunConfig& c) {
         c.zero.stage = 3;
         c.mesh.dp_replicate = c.mesh.dp_shard = 2;
       }},
      {"tp 4", 4, [](RunConfig& c) { c.mesh.tp = 4; }},
      {"cp 2 x sp 2", 4,
       [](RunConfig& c) {
         c.mesh.cp = c.mesh.tp = 2;
         c.tensor.sequence_parallel = true;
       }},
      {"pp 3", 3, [](RunConfig& c) { c.mesh.pp = 3; }},
      {"pp 2 x zero 3 x tp 2", 8, [](RunConfig& c) {
         c.mesh.pp = c.mesh.tp = 2;
         c.zero.stage = 3;
       }}};
  return meshes;
}

const std::vector<Mesh>& expert_meshes() {
  static const std::vector<Mesh> meshes = {
      {"one rank", 1, [](RunConfig&) {}},
      {"dp 3", 3, [](RunConfig& c) { c.mesh.dp = 3; }},
      {"ep 2", 2, [](RunConfig& c) { c.mesh.ep = 2; }},
      {"ep 4", 4, [](RunConfig& c) { c.mesh.tp = c.mesh.ep = 4; }},
      {"etp 2", 2, [](RunConfig& c) { c.mesh.tp = c.mesh.etp = 2; }},
      {"ep 2 x etp 2", 4,
       [](RunConfig& c) { c.mesh.tp = c.mesh.etp = c.mesh.ep = 2; }},
      {"zero 3, ep 2", 6,
       [](RunConfig& c) {
         c.zero.stage = 3;
         c.mesh.ep = 2;
       }},
      {"zero 3, of experts 0", 2,
       [](RunConfig& c) {
         c.zero.stage = 3;
         c.zero.expert_stage = 0;
       }},
      {"pp 3, of experts 3", 6,
       [](RunConfig& c) {
         c.mesh.pp = 3;
         c.zero.expert_stage = 3;
       }},
      {"pp 2 x zero 2 x tp 2, ep 4", 8,
       [](RunConfig& c) {
         c.mesh.pp = c.mesh.tp = 2;
         c.mesh.ep = 4;
         c.zero.stage = 2;
       }},
      {"zero 3 by replica x tp 2, ep 2", 8,
       [](RunConfig& c) {
         c.mesh.dp_replicate = c.mesh.tp = c.mesh.ep = 2;
         c.zero.stage = 3;
         c.zero.expert_shard = "dp_shard";
       }},
      {"zero 3 over replicas x tp 2, ep 2", 8,
       [](RunConfig& c) {
         c.mesh.dp_replicate = c.mesh.tp = c.mesh.ep = 2;
         c.zero.stage = 3;
       }},
      {"of experts 2, by replica of tp 2", 4, [](RunConfig& c) {
         c.mesh.tp = 2;
         c.zero.expert_stage = 2;
         c.zero.expert_shard = "dp_shard";
       }}};
  return meshes;
}

RunConfig configuration(const Mesh& mesh, const char* family) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = 8;
  config.model.family = family;
  config.model.layers = 3;
  config.model.hidden = 16;
  config.model.heads = 4;
  config.model.kv_heads = 2;
  config.model.ffn = 13;
  config.model.vocab = 61;
  config.model.max_seq = 8;
  if (config.model.family == "mixtral") config.model.moe.experts = 4;
  config.batch = {.global = 12, .micro = 1};
  config.optimizer.lr = 0.01;
  mesh.set(config);
  complete(config, mesh.world);
  return config;
}

double loss_of_step(RankModel& model, const RunConfig& config,
                    comm::Group& world, int64_t step) {
  model.step(step_input(config, step, config.optimizer.lr,
                        [&](int64_t of, int64_t first, int64_t count) {
                          return verify::random_batch(config, of, first, count);
                        }));
  at::Tensor sums = at::tensor(
      {model.actor().loss_sum(), model.actor().weight()}, at::kDouble);
  world.all_reduce(sums).wait();
  return sums[0].item<double>() / sums[1].item<double>();
}

// What was saved, and the loss of the step after it.
struct Saved {
  std::map<std::string, at::Tensor> whole;
  double next_loss = 0;
};

// As checkpoints were before experts were stacked.
checkpoint::State one_by_one(const checkpoint::State& state) {
  const auto rest = [](const std::vector<int64_t>& dims) {
    return std::vector<int64_t>(dims.begin() + 1, dims.end());
  };
  checkpoint::State old;
  old.extra = state.extra;
  for (const auto& entry : state.tensors) {
    if (entry.slices.empty()) {
      old.tensors.push_back(entry);
      continue;
    }
    for (int64_t e = 0; e < entry.box.size[0]; ++e) {
      old.tensors.push_back(
          {.name = entry.slices[entry.box.offset[0] + e],
           .global_shape = rest(entry.global_shape),
           .box = {rest(entry.box.offset), rest(entry.box.size)},
           .local = entry.local[e],
           .owned = entry.owned});
    }
  }
  return old;
}

// Of one number, on the last rank that holds something others do too.
void expect_a_change_is_found(const checkpoint::State& state,
                              const mesh::DeviceMesh& mesh,
                              comm::Group& world) {
  const auto shared = std::ranges::find_if(state.tensors, [](const auto& each) {
    return each.holders > 1 && !each.box.empty();
  });
  const bool has = shared != state.tensors.end();
  at::Tensor last = at::full({1}, has ? world.rank() : -1, at::kLong);
  if (world.size() > 1) world.all_reduce(last, comm::ReduceOp::kMax).wait();
  const auto rank = last.item<int64_t>();
  if (rank < 0) return;
  const bool is_mine = rank == world.rank();
  const at::Tensor before = is_mine ? shared->local.clone() : at::Tensor();
  if (is_mine) shared->local.flatten()[-1].add_(1);
  const std::string found = differing_replicas(state, mesh, world);
  EXPECT_THAT(found, HasSubstr(std::to_string(rank) + " ("));
  if (is_mine) {
    EXPECT_THAT(found, HasSubstr(shared->name));
    shared->local.copy_(before);
  }
  EXPECT_EQ(differing_replicas(state, mesh, world), "");
}

Saved save_on(const Mesh& mesh, const char* family, const std::string& folder,
              bool old_form = false) {
  const RunConfig config = configuration(mesh, family);
  Saved saved;
  std::mutex mutex;
  comm::run_threads(mesh.world, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    EXPECT_EQ(differing_replicas(state_of(model.composed(), model.optimizer()),
                                 model.mesh(), ranks.world()),
              "");
    for (int64_t step = 0; step < 2; ++step) {
      loss_of_step(model, config, ranks.world(), step);
    }
    checkpoint::State state = state_of(model.composed(), model.optimizer());
    state.extra = "{}";
    EXPECT_EQ(differing_replicas(state, model.mesh(), ranks.world()), "");
    expect_a_change_is_found(state, model.mesh(), ranks.world());
    checkpoint::save(folder, 2, old_form ? one_by_one(state) : state,
                     ranks.world());
    {
      const std::scoped_lock lock(mutex);
      for (const auto& entry : state.tensors) {
        at::Tensor& whole = saved.whole[entry.name];
        if (!whole.defined()) {
          whole = at::zeros(entry.global_shape, entry.local.options());
        }
        mesh::slice(whole, entry.box).copy_(entry.local);
      }
    }
    const double loss = loss_of_step(model, config, ranks.world(), 2);
    if (ranks.rank() == 0) saved.next_loss = loss;
  });
  return saved;
}

void load_on(const Mesh& mesh, const char* family, const std::string& folder,
             const Saved& saved) {
  const RunConfig config = configuration(mesh, family);
  RunConfig other = config;
  other.run.seed = 1;  // other weights until the checkpoint is loaded
  comm::run_threads(mesh.world, "shm", [&](comm::Communicator& ranks) {
    RankModel model(other, ranks);
    checkpoint::State state = state_of(model.composed(), model.optimizer());
    checkpoint::load(folder + "/step-2", state, ranks.world());
    for (const auto& entry : state.tensors) {
      const at::Tensor box = mesh::slice(saved.whole.at(entry.name), entry.box);
      EXPECT_TRUE(at::equal(entry.local, box)) << entry.name;
    }
    const double loss = loss_of_step(model, config, ranks.world(), 2);
    EXPECT_NEAR(loss, saved.next_loss, 1e-5 * saved.next_loss);
  });
}

class State : public ::testing::TestWithParam<const char*> {};

TEST_P(State, SavedOnEachMeshAndLoadedOnEach) {
  const bool dense = std::string(GetParam()) == "llama";
  const auto& meshes = dense ? dense_meshes() : expert_meshes();
  ASSERT_GE(meshes.size(), 10U);
  for (const Mesh& from : meshes) {
    const TemporaryFolder folder;
    const Saved saved = save_on(from, GetParam(), folder.path().string());
    for (const Mesh& to : meshes) {
      SCOPED_TRACE(std::string(from.name) + " -> " + to.name);
      load_on(to, GetParam(), folder.path().string(), saved);
    }
  }
}

TEST(OlderState, HasExpertsOneByOne) {
  for (const size_t from : {0, 6}) {
    const TemporaryFolder folder;
    const Saved saved = save_on(expert_meshes()[from], "mixtral",
                                folder.path().string(), /*old_form=*/true);
    for (const size_t to : {0, 2, 5, 9}) {
      SCOPED_TRACE(std::to_string(from) + " -> " + std::to_string(to));
      load_on(expert_meshes()[to], "mixtral", folder.path().string(), saved);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, State,
                         ::testing::Values("llama", "mixtral"));

}  // namespace
}  // namespace tessera::train
