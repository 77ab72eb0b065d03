#include "tessera/planner/search.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/step_plan.h"
#include "tessera/planner/memory_floor.h"

namespace tessera::planner {
namespace {

constexpr int64_t kWorld = 4;

Cluster small_cluster() {
  Cluster cluster;
  cluster.nodes = 2;
  cluster.devices_per_node = 2;
  cluster.device = {.kind = "cpu", .tflops = 0.05, .memory_gib = 1};
  cluster.in_node = {.latency_us = 2, .gb_per_s = 4};
  cluster.between_nodes = {.latency_us = 20, .gb_per_s = 0.5};
  return cluster;
}

// Of a model that is not complete.
engine::RunConfig sizes() {
  engine::RunConfig config;
  config.run.device = "cpu";
  config.data.train = {"random tokens"};
  config.data.seq_len = 64;
  config.model.layers = 4;
  config.model.hidden = 64;
  config.model.heads = 4;
  config.model.vocab = 512;
  config.model.max_seq = 64;
  config.model.tie_embeddings = false;
  config.batch.global = 16;
  config.precision.compute = "fp32";
  return config;
}

engine::RunConfig run(bool has_experts = false) {
  auto config = sizes();
  if (has_experts) {
    config.model.family = "mixtral";
    config.model.moe.experts = 4;
  }
  config.model.complete();
  return config;
}

bool is_never_set(const std::string& /*key*/) { return false; }
const IsSet kNothingIsSet = is_never_set;
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

std::string refusal(const engine::RunConfig& config, const Cluster& cluster,
                    const SearchOptions& options) {
  try {
    search(config, cluster, options, kNothingIsSet);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }
  return "";
}

// The layout with this mode; none: a rule forbids it.
std::optional<engine::RunConfig> completed_of(const Layout& layout,
                                              const engine::RunConfig& base,
                                              const IsSet& is_set,
                                              const std::string& mode) {
  engine::RunConfig config = layout.of(base, is_set);
  config.recompute.mode = mode;
  try {
    complete(config, kWorld);
  } catch (const Error&) {
    return std::nullopt;
  }
  return config;
}

// That the floor is not above it.
int64_t held_by(const Layout& layout, const engine::RunConfig& base,
                const engine::RunConfig& completed) {
  const int64_t held = engine::memory_plan(completed).total();
  EXPECT_LE(MemoryFloor(base, completed, kWorld).of(layout), held)
      << mesh_of(completed, kWorld).describe() << " zero " << layout.zero_stage
      << " micro " << layout.micro << " " << layout.schedule << " "
      << completed.recompute.mode;
  return held;
}

// Attention is most of what these do.
TEST(Search, PiecesOfALongSequenceHaveABoundToo) {
  auto config = run();
  config.data.seq_len = config.model.max_seq = 4096;
  config.batch.global = 4;
  const IsSet is_set = [](const std::string& key) { return key == "mesh.pp"; };
  const auto first = [&](int64_t top) {
    return search(config, small_cluster(),
                  {.world_size = kWorld, .top = top, .most = kAll}, is_set)
        .plans.at(0)
        .step_s;
  };
  EXPECT_EQ(first(1), first(1000));
}

// Stages that cannot be equal, and few micro-batches.
engine::RunConfig uneven() {
  auto config = run();
  config.model.layers = 5;
  config.model.vocab = 16;
  config.batch.global = 4;
  return config;
}

// Products of several micro-batches wait for each other.
engine::RunConfig of_few_rows() {
  auto config = run();
  config.data.seq_len = 8;
  config.model.hidden = 256;
  config.model.layers = 8;
  config.model.vocab = 16;
  return config;
}

// The head, which is not computed again, at three depths.
engine::RunConfig ahead() {
  auto config = sizes();
  config.model.family = "deepseek_v3";
  config.model.layers = 2;
  config.model.vocab = 2048;
  config.model.moe.experts = 4;
  config.model.moe.ffn = 16;
  config.model.latent.rope_dim = 8;
  config.model.mtp.layers = 2;
  config.model.complete();
  return config;
}

struct Model {
  std::string name;
  engine::RunConfig config;
  bool has_fast_links = false;
};
void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

class EachBoundTest : public ::testing::TestWithParam<Model> {};
INSTANTIATE_TEST_SUITE_P(
    Models, EachBoundTest,
    ::testing::Values(Model{"Dense", run()}, Model{"Experts", run(true)},
                      Model{"Uneven", uneven(), true},
                      Model{"FewRows", of_few_rows(), true},
                      Model{"Ahead", ahead(), true}),
    [](const auto& of) { return of.param.name; });

// By the simulator alone, of every layout: what the search may rule nothing
// out against.
TEST_P(EachBoundTest, NothingIsFasterThanItsBoundAndTheFastestIsFound) {
  Cluster cluster = small_cluster();
  if (GetParam().has_fast_links) {  // that take no time
    cluster.in_node =
        cluster.between_nodes = {.latency_us = 1e-3, .gb_per_s = 1e4};
  }
  const auto& config = GetParam().config;
  const TokenFlops flops(config);
  double fastest = std::numeric_limits<double>::infinity();
  int64_t layouts = 0, refused = 0;
  for (const Layout& layout :
       layouts_of(config, cluster, kWorld, kNothingIsSet)) {
    for (const char* mode : {"none", "selective", "block"}) {
      const auto completed = completed_of(layout, config, kNothingIsSet, mode);
      if (!completed) {
        ++refused;
        break;
      }
      const auto mesh = mesh_of(*completed, kWorld);
      const double step =
          engine::plan_step(*completed, cluster.costs(mesh)).step;
      const double bound =
          layout.bound * flops.recompute_factor(mode, /*every=*/0);
      EXPECT_GE(step, bound * (1 - 1e-9))
          << mesh.describe() << " " << completed->pipeline.schedule << " "
          << completed->batch.micro << " " << mode;
      fastest = std::min(fastest, step);
    }
    ++layouts;
  }
  EXPECT_GT(layouts, 60);
  const Search found =
      search(config, cluster, {.world_size = kWorld, .top = 1, .most = kAll},
             kNothingIsSet);
  ASSERT_EQ(found.plans.size(), 1);
  EXPECT_EQ(found.plans[0].step_s, fastest);
  EXPECT_EQ(found.layouts, layouts);
  EXPECT_EQ(found.layouts, found.simulated + found.too_large + found.refused +
                               found.ruled_out + found.left);
  EXPECT_EQ(found.left, 0);
  EXPECT_EQ(found.left_bound_s, 0);
  EXPECT_LT(found.simulated, layouts - refused);
}

// Where ranks that are faster do more.
TEST(Search, RanksThatAreNotEquallyFastHaveABoundToo) {
  const Cluster cluster = small_cluster();
  const std::vector<std::vector<double>> all = {
      {1, 1, 4, 4}, {4, 4, 1, 1}, {1, 4, 1, 4}, {4, 4, 4, 4}};
  for (const auto& speeds : all) {
    auto config = run();
    config.mesh.speeds = speeds;
    int64_t simulated = 0;
    for (const Layout& layout :
         layouts_of(config, cluster, kWorld, kNothingIsSet)) {
      const auto completed =
          completed_of(layout, config, kNothingIsSet, "none");
      if (!completed) continue;
      ++simulated;
      const auto mesh = mesh_of(*completed, kWorld);
      EXPECT_GE(engine::plan_step(*completed, cluster.costs(mesh)).step,
                layout.bound * (1 - 1e-9))
          << mesh.describe() << " " << completed->pipeline.schedule << " "
          << completed->batch.micro << " speeds " << speeds[0] << " "
          << speeds[1];
    }
    EXPECT_GT(simulated, 0);
    const Search found =
        search(config, cluster, {.world_size = kWorld}, kNothingIsSet);
    EXPECT_LE(found.plans.at(0).mfu, 1);
  }
}

// Whatever the user has set.
TEST(Search, NoFloorIsAboveWhatIsHeld) {
  struct Case {
    std::string name;
    engine::RunConfig config;
    std::vector<std::string> set = {};
  };
  std::vector<Case> cases = {
      {"few micro-batches", run()},
      {"replicas", run(), {"mesh.dp_replicate"}},
      {"an optimizer with less", run()},
      {"an optimizer with nothing", run()},
      {"experts by replica",
       run(/*has_experts=*/true),
       {"mesh.dp_replicate", "mesh.dp_shard"}},
      {"experts over tp", run(/*has_experts=*/true), {"mesh.etp"}}};
  cases[0].config.batch.global = 2;
  cases[0].config.model.layers = 2;
  cases[1].config.mesh.dp_replicate = 2;
  cases[2].config.optimizer.type = "lion";
  cases[3].config.optimizer.type = "sgd";
  cases[4].config.mesh.dp_replicate = cases[4].config.mesh.dp_shard = 2;
  cases[4].config.zero.expert_shard = "dp_shard";
  cases[5].config.mesh.etp = 2;
  for (const auto& [name, config, set] : cases) {
    SCOPED_TRACE(name);
    const IsSet is_set = [&](const std::string& key) {
      return std::ranges::count(set, key) > 0;
    };
    int64_t layouts = 0;
    for (const Layout& layout :
         layouts_of(config, small_cluster(), kWorld, is_set)) {
      for (const char* mode : {"none", "block"}) {
        const auto completed = completed_of(layout, config, is_set, mode);
        if (!completed) break;
        ++layouts;
        held_by(layout, config, *completed);
      }
    }
    EXPECT_GT(layouts, 3);
  }
}

// Ways to lay out that have no mesh are for a rule to refuse.
TEST(Search, WhatHasNoMeshWithWhatIsSetIsRefused) {
  Cluster cluster = small_cluster();
  cluster.device.memory_gib = 1e-5;
  auto config = run();
  config.mesh.dp = 2;
  const IsSet is_set = [](const std::string& key) { return key == "mesh.dp"; };
  try {
    search(config, cluster, {.world_size = kWorld}, is_set);
    ADD_FAILURE() << "something fits";
  } catch (const Error& error) {
    EXPECT_NE(message_of(error).find("no layout of 4 ranks fits"),
              std::string::npos)
        << message_of(error);
  }
}

class EachModelTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Models, EachModelTest, ::testing::Bool(),
                         [](const auto& of) {
                           return of.param ? "Experts" : "Dense";
                         });

// However little there is: no floor of memory rules out what fits.
TEST_P(EachModelTest, TheFastestThatFitsIsFoundOnAnyMemory) {
  Cluster cluster = small_cluster();
  for (const char* compute : {"fp32", "bf16"}) {
    if (GetParam() && compute == std::string("fp32")) continue;  // as dense
    auto config = run(GetParam());
    config.precision.compute = compute;
    if (compute == std::string("bf16"))
      config.model.vocab = 20000;  // bare ends
    struct Form {
      int64_t bytes;
      double step;
    };
    std::vector<std::vector<Form>> layouts;  // of each: less and less memory
    std::vector<int64_t> sizes;
    for (const Layout& layout :
         layouts_of(config, cluster, kWorld, kNothingIsSet)) {
      auto& forms = layouts.emplace_back();
      for (const char* mode : {"none", "selective", "block"}) {
        const auto completed =
            completed_of(layout, config, kNothingIsSet, mode);
        if (!completed) break;
        const auto costs = cluster.costs(mesh_of(*completed, kWorld));
        forms.push_back({held_by(layout, config, *completed),
                         engine::plan_step(*completed, costs).step});
        sizes.push_back(forms.back().bytes);
      }
    }
    std::ranges::sort(sizes);
    for (const size_t part : {0, 1, 4, 12}) {
      const int64_t memory = sizes[part * sizes.size() / 24];
      double fastest = std::numeric_limits<double>::infinity();
      for (const auto& forms : layouts) {
        const auto fits = std::ranges::find_if(
            forms, [&](const Form& form) { return form.bytes <= memory; });
        if (fits != forms.end()) fastest = std::min(fastest, fits->step);
      }
      cluster.device.memory_gib =
          static_cast<double>(memory) / static_cast<double>(int64_t{1} << 30);
      const Search found =
          search(config, cluster,
                 {.world_size = kWorld, .top = 1, .most = kAll}, kNothingIsSet);
      EXPECT_NEAR(found.plans.at(0).step_s, fastest, 1e-12 * fastest)
          << compute << ", " << memory << " bytes";
    }
  }
}

TEST(Search, TheBestAreOfMeshesOfTheirOwn) {
  const Search found =
      search(run(), small_cluster(),
             {.world_size = kWorld, .top = 4, .most = kAll}, kNothingIsSet);
  ASSERT_EQ(found.plans.size(), 4);
  for (size_t i = 1; i < found.plans.size(); ++i) {
    EXPECT_GE(found.plans[i].step_s, found.plans[i - 1].step_s);
    EXPECT_NE(found.plans[i].mesh, found.plans[i - 1].mesh);
  }
  const Plan& best = found.plans[0];
  EXPECT_DOUBLE_EQ(best.tokens_per_s * best.step_s, 16 * 64);
  EXPECT_GT(best.mfu, 0);
  EXPECT_LE(best.mfu, 1);
  EXPECT_EQ(best.peak_bytes, engine::memory_plan(best.config).total());
  EXPECT_GT(best.moved_bytes, 0);
  const auto reasons = reasons_of(found, small_cluster());
  EXPECT_TRUE(std::ranges::any_of(reasons, [](const std::string& reason) {
    return reason.starts_with("mesh.pp ") &&
           reason.find(" times as long") != std::string::npos;
  })) << c10::Join("; ", reasons);
  const auto changes = changes_of(best, small_cluster());
  EXPECT_EQ(changes.size(), 4);
  EXPECT_LT(changes[0].step, 1);
  for (const Change& change : changes) EXPECT_GE(change.step, 0.5);
}

// The run with a key's value as outcomes have it.
engine::RunConfig with(engine::RunConfig config, const std::string& key,
                       const std::string& value) {
  config::Section root;
  config.declare(root);
  config::resolve(root, "{}", "", {{key, value, "--" + key}});
  return config;
}

// Of all layouts with that value; none: no such layout fits.
std::optional<double> fastest_with(const std::string& key,
                                   const std::string& value,
                                   const engine::RunConfig& config,
                                   const Cluster& cluster) {
  const SearchOptions options{.world_size = kWorld, .top = 1, .most = kAll};
  const IsSet is_set = [&](const std::string& name) { return name == key; };
  try {
    return search(with(config, key, value), cluster, options, is_set)
        .plans.at(0)
        .step_s;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// With layouts that are ruled out, left, and in need of recomputation.
TEST(Search, WhatIsSaidOfAValueHoldsOfTheBestLayoutWithIt) {
  Cluster cluster = small_cluster();
  cluster.device.memory_gib = 0.003;
  const auto config = run();
  for (const int64_t most : {int64_t{8}, kAll}) {
    const Search found =
        search(config, cluster, {.world_size = kWorld, .top = 2, .most = most},
               kNothingIsSet);
    for (const auto* key :
         {"mesh.pp", "mesh.tp", "mesh.cp", "batch.micro", "recompute.mode"}) {
      for (const auto& [value, outcome] : found.outcomes.at(key)) {
        const std::string what = c10::str(key, " ", value, ", most ", most);
        const auto fastest = fastest_with(key, value, config, cluster);
        if (!fastest) {
          EXPECT_EQ(outcome.best_s, 0) << what;
          continue;
        }
        EXPECT_GT(outcome.best_s + outcome.bound_s, 0) << what;
        const double best = outcome.best_s > 0 ? outcome.best_s : *fastest;
        const double bound = outcome.bound_s > 0 ? outcome.bound_s : best;
        EXPECT_LE(*fastest, best * (1 + 1e-9)) << what;
        EXPECT_GE(*fastest, std::min(bound, best) * (1 - 1e-9)) << what;
      }
    }
  }
}

TEST(Search, AReasonSaysWhatIsKnown) {
  Search found = search(run(), small_cluster(),
                        {.world_size = kWorld, .top = 1}, kNothingIsSet);
  Plan& best = found.plans.at(0);
  best.step_s = 2;
  best.config.mesh.cp = 1;
  found.outcomes = {{"mesh.cp",
                     {{"1", {.best_s = 2, .bound_s = 1.9}},
                      {"2", {.best_s = 3}},
                      {"4", {.best_s = 3, .bound_s = 2.5}},
                      {"8", {.best_s = 3, .bound_s = 3.5}},
                      {"16", {.best_s = 3, .bound_s = 2.999}},
                      {"32", {.bound_s = 1.8, .least_bytes = int64_t{1} << 30}},
                      {"64", {.least_bytes = int64_t{1} << 30}},
                      {"128", {}}}}};
  EXPECT_EQ(reasons_of(found, small_cluster()).back(),
            "mesh.cp 1. With 2: 1.50, 4: 1.25 to 1.50, 8: 1.50, 16: 1.50, 32: "
            "at least 0.90 times as long. Too large: 64 (1.0 GiB), 128");
}

TEST(Search, WhatTheUserHasSetIsKept) {
  auto config = run();
  config.mesh.tp = 2;
  config.recompute.mode = "block";
  const IsSet is_set = [](const std::string& key) {
    return key == "mesh.tp" || key == "recompute.mode";
  };
  const Search found =
      search(config, small_cluster(), {.world_size = kWorld, .top = 3}, is_set);
  ASSERT_FALSE(found.plans.empty());
  for (const Plan& plan : found.plans) {
    EXPECT_EQ(plan.config.mesh.tp, 2);
    EXPECT_EQ(plan.config.recompute.mode, "block");
  }
}

TEST(Search, ChunksThatTheUserHasSetAreKept) {
  auto config = run();
  config.mesh.pp = 2;
  config.pipeline.chunks = 2;
  const IsSet is_set = [](const std::string& key) {
    return key == "mesh.pp" || key == "pipeline.chunks";
  };
  for (const Layout& layout :
       layouts_of(config, small_cluster(), kWorld, is_set)) {
    EXPECT_EQ(layout.chunks, 2) << layout.schedule;
  }
}

// Of a pipeline of two stages, each once: "zb_v 2".
std::set<std::string> schedules_with(std::optional<int64_t> chunks) {
  auto config = run();
  config.model.layers = 8;
  config.mesh.pp = 2;
  config.pipeline.chunks = chunks.value_or(0);
  const IsSet is_set = [&](const std::string& key) {
    return key == "mesh.pp" || (key == "pipeline.chunks" && chunks);
  };
  std::set<std::string> names;
  std::set<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t,
                      int64_t, int64_t>>
      seen;
  for (const Layout& each :
       layouts_of(config, small_cluster(), kWorld, is_set)) {
    names.insert(c10::str(each.schedule, " ", each.chunks));
    EXPECT_TRUE(seen.emplace(each.schedule, each.chunks, each.tp, each.cp,
                             each.dp_replicate, each.dp_shard, each.zero_stage,
                             each.micro)
                    .second)
        << each.schedule;
  }
  return names;
}

TEST(Search, SchedulesAreThoseThatTakeTheChunks) {
  using Names = std::set<std::string>;
  EXPECT_EQ(
      schedules_with(std::nullopt),
      (Names{"1f1b 0", "interleaved 2", "interleaved 4", "zb_h1 0", "zb_v 2"}));
  EXPECT_EQ(schedules_with(0), (Names{"1f1b 0", "zb_h1 0", "zb_v 0"}));
  EXPECT_EQ(schedules_with(1), (Names{"1f1b 1", "zb_h1 1"}));
  EXPECT_EQ(schedules_with(2), (Names{"interleaved 2", "zb_v 2"}));
  EXPECT_EQ(schedules_with(4), (Names{"interleaved 4"}));
}

// Three through two stages, which interleaved does not take.
TEST(Search, AScheduleIsLeftOutOnlyWhereItHasNoTurns) {
  auto config = run();
  config.mesh.pp = config.mesh.tp = 2;
  config.batch.global = 3;
  config.batch.micro = 1;
  const IsSet is_set = [](const std::string& key) {
    return key == "mesh.pp" || key == "mesh.tp" || key == "batch.micro";
  };
  std::set<std::string> names;
  for (const Layout& each :
       layouts_of(config, small_cluster(), kWorld, is_set)) {
    names.insert(each.schedule);
  }
  EXPECT_EQ(names, (std::set<std::string>{"1f1b", "zb_h1", "zb_v"}));
}

// Behind as many as are looked at, while nothing fits.
TEST(Search, WhatFitsIsFoundHoweverFarBehind) {
  Cluster cluster = small_cluster();
  const auto all = [&](int64_t most) {
    return search(run(), cluster,
                  {.world_size = kWorld, .top = 1, .most = most},
                  kNothingIsSet);
  };
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Layout& layout :
       layouts_of(run(), cluster, kWorld, kNothingIsSet)) {
    const auto config = completed_of(layout, run(), kNothingIsSet, "block");
    if (!config) continue;
    least = std::min(least, engine::memory_plan(*config).total());
  }
  cluster.device.memory_gib =
      static_cast<double>(least) / static_cast<double>(int64_t{1} << 30);
  EXPECT_EQ(all(/*most=*/1).plans.at(0).peak_bytes, least);
}

// On less memory the search goes where the model is cut up more.
TEST(Search, WhatIsTooLargeIsNotTaken) {
  Cluster cluster = small_cluster();
  const SearchOptions options{.world_size = kWorld, .top = 1, .most = kAll};
  const int64_t free =
      search(run(), cluster, options, kNothingIsSet).plans[0].peak_bytes;
  cluster.device.memory_gib =
      static_cast<double>(free - 1) / static_cast<double>(int64_t{1} << 30);
  const Search found = search(run(), cluster, options, kNothingIsSet);
  EXPECT_LT(found.plans[0].peak_bytes, free);
  EXPECT_GT(found.too_large, 0);
  cluster.device.memory_gib = 1e-5;
  const std::string said = refusal(run(), cluster, options);
  EXPECT_NE(said.find("plan: no layout of 4 ranks fits: the fullest rank would "
                      "hold "),
            std::string::npos)
      << said;
}

TEST(Search, WhatHasNoMeshIsRefused) {
  EXPECT_NE(refusal(run(), small_cluster(), {.world_size = 16})
                .find("--world 16 is more than the cluster has: nodes 2 x "
                      "devices_per_node 2 = 4."),
            std::string::npos);
  auto config = run();
  config.batch.global = 1;
  config.model.layers = 2;
  config.data.seq_len = 63;
  EXPECT_NE(refusal(config, small_cluster(), {.world_size = 3})
                .find("plan: no mesh of 3 ranks fits the model"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::planner
