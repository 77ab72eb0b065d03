#include "tessera/planner/cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::planner {
namespace {

class ClusterTest : public ::testing::Test {
 protected:
  std::string file(const std::string& text) const {
    const std::string path = folder_.file("cluster.json");
    std::ofstream(path) << text;
    return path;
  }
  // What reading this says; "": nothing. Without the file's name.
  std::string complaint(const std::string& text) const {
    try {
      read_cluster(file(text));
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      std::string said = message_of(error);
      EXPECT_TRUE(said.starts_with(folder_.file("cluster.json"))) << said;
      return said.substr(folder_.file("cluster.json").size());
    }
    return "";
  }

  const TemporaryFolder folder_{"tessera-cluster"};
};

TEST_F(ClusterTest, WhatIsNotSaidIsAskedFor) {
  EXPECT_EQ(complaint(R"({"nodes": 2})"),
            ": devices_per_node is missing or 0: how many devices a node has.");
  EXPECT_EQ(complaint(R"({"devices_per_node": 1})"),
            ": device.tflops is missing or 0: 10^12 operations a second that "
            "products reach.");
  const std::string device = R"("device": {"tflops": 1, "memory_gib": 2})";
  EXPECT_EQ(complaint(R"({"devices_per_node": 1, )" + device + "}"), "");
  EXPECT_EQ(
      complaint(R"({"devices_per_node": 2, )" + device + "}"),
      ": in_node.gb_per_s is missing or 0: how fast devices of a node talk.");
  EXPECT_EQ(complaint(R"({"nodes": 2, "devices_per_node": 1, )" + device + "}"),
            ": between_nodes.gb_per_s is missing or 0: how fast nodes talk.");
  const std::string links =
      R"("in_node": {"gb_per_s": 1}, "between_nodes": {"gb_per_s": 1}, )";
  EXPECT_EQ(complaint(R"({"nodes": 131072, "devices_per_node": 2, )" + links +
                      device + "}"),
            ": nodes 131072 x devices_per_node 2 are more than the 131072 "
            "devices that plans are made for.");
  EXPECT_NE(complaint(R"({"devices_per_nod": 1})").find("devices_per_node"),
            std::string::npos);
}

TEST_F(ClusterTest, AGroupThatLeavesANodeIsAsFastAsTheLinkBetweenNodes) {
  const Cluster cluster = read_cluster(file(R"({"nodes": 4,
      "devices_per_node": 4, "device": {"tflops": 3, "memory_gib": 2},
      "in_node": {"latency_us": 1, "gb_per_s": 100},
      "between_nodes": {"latency_us": 7, "gb_per_s": 10}})"));
  EXPECT_EQ(cluster.num_devices(), 16);
  EXPECT_EQ(cluster.memory_bytes(), int64_t{2} << 30);
  // Ranks of tp are neighbours, then those of data, then stages.
  const mesh::DeviceMesh mesh({.pp = 2, .dp_shard = 4, .tp = 2}, 16);
  const auto costs = cluster.costs(mesh);
  EXPECT_EQ(costs.device->flops, 3e12);
  EXPECT_EQ(costs.links.at("tp").bytes_per_time, 100e9);
  EXPECT_EQ(costs.links.at("tp").latency, 1e-6);
  EXPECT_EQ(costs.links.at("dp_shard").bytes_per_time, 10e9);
  EXPECT_EQ(costs.links.at("pp").latency, 7e-6);
  const mesh::DeviceMesh small({.dp_shard = 2, .tp = 2}, 4);
  EXPECT_EQ(cluster.costs(small).links.at("dp_shard").bytes_per_time, 100e9);
  EXPECT_EQ(cluster.costs(small).links.at("").bytes_per_time, 100e9);
  EXPECT_EQ(costs.links.at("").bytes_per_time, 10e9);
}

// Of three ranks on nodes of four the second group lies on two of them.
TEST_F(ClusterTest, GroupsThatDoNotFillNodesCrossThem) {
  const Cluster cluster = read_cluster(file(R"({"nodes": 3,
      "devices_per_node": 4, "device": {"tflops": 3, "memory_gib": 2},
      "in_node": {"gb_per_s": 100}, "between_nodes": {"gb_per_s": 10}})"));
  const mesh::DeviceMesh mesh({.dp_shard = 4, .tp = 3}, 12);
  EXPECT_EQ(&cluster.link_along(mesh::Axis::kTp, mesh), &cluster.between_nodes);
  const mesh::DeviceMesh alone({.tp = 3}, 3);
  EXPECT_EQ(&cluster.link_along(mesh::Axis::kTp, alone), &cluster.in_node);
}

// Of 16 ranks on nodes of 4, in any order of the axes, by each group itself.
TEST_F(ClusterTest, AnAxisIsAsFastAsTheSlowestOfItsGroups) {
  const Cluster cluster = read_cluster(file(R"({"nodes": 4,
      "devices_per_node": 4, "device": {"tflops": 3, "memory_gib": 2},
      "in_node": {"gb_per_s": 100}, "between_nodes": {"gb_per_s": 10}})"));
  using mesh::Axis;
  const std::vector<mesh::Degrees> degrees = {
      {.pp = 2, .dp_shard = 4, .tp = 2, .ep = 4},
      {.pp = 2, .dp_shard = 4, .tp = 2, .ep = 2, .etp = 2},
      {.pp = 2, .dp_shard = 2, .cp = 2, .tp = 2, .ep = 8},
      {.pp = 4, .dp_shard = 2, .tp = 2, .ep = 2}};
  std::vector<Axis> order(mesh::kAxes.begin(), mesh::kAxes.end());
  std::ranges::sort(order);
  do {
    for (const auto& each : degrees) {
      const mesh::DeviceMesh mesh(each, 16, order);
      for (size_t i = 0; i < mesh::kNumAxes; ++i) {
        const auto axis = static_cast<Axis>(i);
        bool leaves = false;
        for (int64_t rank = 0; rank < 16; ++rank) {
          for (const int64_t peer : mesh.peers(rank, {axis})) {
            leaves |= peer / 4 != rank / 4;
          }
        }
        EXPECT_EQ(&cluster.link_along(axis, mesh),
                  leaves ? &cluster.between_nodes : &cluster.in_node)
            << mesh.describe() << " " << mesh.describe_groups(axis);
      }
    }
  } while (std::ranges::next_permutation(order).found);
}

}  // namespace
}  // namespace tessera::planner
