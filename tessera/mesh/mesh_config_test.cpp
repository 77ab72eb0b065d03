#include "tessera/mesh/mesh_config.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

// "dp_replicate dp_shard", or the refusal.
std::string found(const MeshConfig& config, int64_t world, int64_t stage) {
  try {
    const DeviceMesh mesh = config.mesh(world, stage);
    return c10::str(mesh.degree(Axis::kDpReplicate), " ",
                    mesh.degree(Axis::kDpShard));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
}

TEST(MeshConfig, DataParallelTakesWhatTheWorldLeaves) {
  EXPECT_EQ(found({}, 1, 0), "1 1");
  EXPECT_EQ(found({}, 6, 0), "6 1");
  EXPECT_EQ(found({}, 6, 3), "1 6");
  EXPECT_EQ(found({.tp = 2}, 6, 0), "3 1");
  EXPECT_EQ(found({.pp = 2, .tp = 2}, 24, 1), "1 6");
  EXPECT_EQ(found({.dp_replicate = 2}, 6, 1), "2 3");
  EXPECT_EQ(found({.dp_shard = 2}, 6, 1), "3 2");
}

TEST(MeshConfig, DpIsShorthand) {
  EXPECT_EQ(found({.dp = 4}, 4, 0), "4 1");
  EXPECT_EQ(found({.dp = 4}, 4, 1), "1 4");
  EXPECT_EQ(found({.dp = 4, .dp_replicate = 2}, 4, 2), "2 2");
  EXPECT_EQ(found({.dp = 4, .dp_replicate = 2, .dp_shard = 2}, 4, 2), "2 2");
  EXPECT_EQ(found({.dp = 4, .dp_replicate = 4, .dp_shard = 1}, 4, 0), "4 1");
  EXPECT_EQ(found({.dp = 4, .dp_replicate = 2, .dp_shard = 1}, 2, 0),
            "mesh.dp is 4, but dp_replicate 2 x dp_shard 1 = 2. Leave mesh.dp "
            "out, or the other two.");
}

TEST(MeshConfig, ExpertsMayKeepReplicasApart) {
  const MeshConfig config{.dp_replicate = 2, .dp_shard = 2};
  EXPECT_EQ(config.mesh(4, 3).degree(Axis::kExpertReplicate), 1);
  EXPECT_EQ(config.mesh(4, 3).degree(Axis::kExpertDp), 4);
  const DeviceMesh apart = config.mesh(4, 3, /*experts_by_replica=*/true);
  EXPECT_EQ(apart.degree(Axis::kExpertReplicate), 2);
  EXPECT_EQ(apart.degree(Axis::kExpertDp), 2);
  EXPECT_EQ(MeshConfig{.dp = 4}
                .mesh(4, 3, /*experts_by_replica=*/true)
                .degree(Axis::kExpertReplicate),
            1);
}

TEST(MeshConfig, RefusesAnotherWorldWithAllFactorsNamed) {
  EXPECT_EQ(found({.dp = 2}, 3, 0),
            "mesh: pp 1 x dp_replicate 2 x dp_shard 1 x cp 1 x tp 1 = 2, but "
            "the world has 3 ranks. Start 2 ranks, or change mesh.dp or "
            "mesh.dp_replicate.");
  EXPECT_EQ(found({.tp = 4}, 6, 0),
            "mesh: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 4 = 4, but "
            "the world has 6 ranks. Start 4 ranks, or change mesh.tp.");
  // No stage gets the rank that is left over.
  EXPECT_EQ(found({.pp = 2}, 5, 0),
            "mesh: pp 2 x dp_replicate 2 x dp_shard 1 x cp 1 x tp 1 = 4, but "
            "the world has 5 ranks. Start 4 ranks, or change mesh.pp or "
            "mesh.dp or mesh.dp_replicate. " +
                std::string(kStagesAreAlike) + ".");
}

TEST(MeshConfig, TheOrderIsTheUsers) {
  const MeshConfig config{
      .dp_replicate = 2,
      .tp = 3,
      .order = {"tp", "pp", "dp_replicate", "dp_shard", "cp"}};
  const DeviceMesh mesh = config.mesh(6, 0);
  EXPECT_EQ(mesh.peers(0, {Axis::kDpReplicate}), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(mesh.peers(0, {Axis::kTp}), (std::vector<int64_t>{0, 2, 4}));
}

TEST(MeshConfig, SpeedsAreUnevenWhereTwoDiffer) {
  EXPECT_FALSE(MeshConfig().uneven());
  EXPECT_FALSE((MeshConfig{.speeds = {2, 2, 2}}.uneven()));
  EXPECT_TRUE((MeshConfig{.speeds = {2, 2, 1}}.uneven()));
  EXPECT_EQ(MeshConfig().speed_of(3), 1);
  EXPECT_EQ((MeshConfig{.speeds = {2, 0.5}}.speed_of(1)), 0.5);
}

std::string refusal(const std::string& json) {
  MeshConfig config;
  config::Section root;
  root.section("mesh", config, "");
  try {
    config::resolve(root, "{\"mesh\": " + json + "}", "f", {});
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(MeshConfig, Keys) {
  EXPECT_EQ(refusal("{\"dp\": 2, \"dp_shard\": 1}"), "");
  EXPECT_EQ(refusal("{\"order\": [\"tp\", \"pp\", \"dp_replicate\", "
                    "\"dp_shard\", \"cp\"]}"),
            "");
  EXPECT_EQ(refusal("{\"ep\": 2, \"etp\": 2}"), "");
  EXPECT_EQ(refusal("{\"speeds\": [1, 0.5], \"measure_speeds\": true}"), "");
  EXPECT_EQ(refusal("{\"speeds\": [1, 0]}"),
            "f:1:21: mesh.speeds is [1.0,0.0]: each is a number above 0, and "
            "finite.");
  EXPECT_NE(refusal("{\"speeds\": [1, -2]}"), "");
  EXPECT_NE(refusal("{\"speeds\": [1, 1e-160]}"), "");
  EXPECT_EQ(refusal("{\"speeds\": [1e-160, 1e-160]}"), "");
  EXPECT_NE(refusal("{\"speeds\": [1, 1e999]}"), "");
  EXPECT_NE(refusal("{\"speeds\": [1, \"fast\"]}"), "");
  EXPECT_EQ(refusal("{\"pp\": 2, \"dp_shard\": 2, \"cp\": 2, \"tp\": 2}"), "");
  EXPECT_EQ(refusal("{\"dp\": -1}"),
            "f:1:17: mesh.dp is -1: it must be at least 0.");
  EXPECT_NE(refusal("{\"order\": [\"pp\", \"dp\"]}").find("every axis once"),
            std::string::npos);
  EXPECT_NE(refusal("{\"order\": []}"), "");
  EXPECT_NE(refusal("{\"data_parallel\": \"ddpp\"}"), "");
}

}  // namespace
}  // namespace tessera::mesh
