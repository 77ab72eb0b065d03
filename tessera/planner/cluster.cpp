#include "tessera/planner/cluster.h"

#include <algorithm>
#include <filesystem>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"

namespace tessera::planner {
namespace {

constexpr double kGiga = 1e9, kMicro = 1e-6;
constexpr int64_t kMostDevices = int64_t{1} << 17;
constexpr double kMost = 1e9, kLeast = 1e-6;  // of any rate

// What has no default.
void require(bool is_there, const std::string& path, const char* key,
             const char* meaning) {
  TS_CHECK_CONFIG(is_there, path, ": ", key, " is missing or 0: ", meaning,
                  ".");
}

// Whether its groups lie in blocks of ranks, one behind the other, each with
// equal steps between its ranks: of experts' axes only where no axis lies
// between those that they are folded of.
bool lies_in_blocks(mesh::Axis axis, const mesh::DeviceMesh& mesh) {
  return std::ranges::count(mesh::kAxes, axis) > 0 ||
         std::ranges::equal(mesh.order(), mesh::kAxes);
}

// Whether the ranks of some group along an axis are of several nodes. Of blocks
// some one does unless they fill nodes. REQUIRES: several nodes, and ranks.
bool leaves_a_node(mesh::Axis axis, const mesh::DeviceMesh& mesh,
                   int64_t devices_per_node) {
  const int64_t degree = mesh.degree(axis);
  if (lies_in_blocks(axis, mesh)) {
    const mesh::DeviceMesh::Along second{.axis = axis, .coords = {1}};
    const int64_t step = mesh.ranks_at(mesh.coord_of(0), {second}).front();
    return devices_per_node % (step * degree) != 0;
  }
  const mesh::DeviceMesh::Along ends{.axis = axis, .coords = {0, degree - 1}};
  for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
    const auto peers = mesh.ranks_at(mesh.coord_of(rank), {ends});
    if (peers.front() / devices_per_node != peers.back() / devices_per_node) {
      return true;
    }
  }
  return false;
}

}  // namespace

program::Link link_of(const ClusterLink& link) {
  return {.latency = link.latency_us * kMicro,
          .bytes_per_time = link.gb_per_s * kGiga};
}

void ClusterDevice::declare(config::Section& section) {
  section.key("kind", kind, "of device").one_of({"cuda", "cpu"});
  section
      .key(
          "tflops", tflops,
          "10^12 operations a second that the run's products reach in its type")
      .at_least(0)
      .at_most(kMost);
  section.key("memory_gib", memory_gib, "2^30 bytes that a rank may hold")
      .at_least(0)
      .at_most(1e9);
  section
      .key("memory_gb_per_s", memory_gb_per_s,
           "10^9 bytes a second of its memory; 0: that takes no time")
      .at_least(0)
      .at_most(kMost);
}

void ClusterLink::declare(config::Section& section) {
  section.key("latency_us", latency_us, "microseconds of a small message")
      .at_least(0)
      .at_most(kMost);
  section
      .key("gb_per_s", gb_per_s,
           "10^9 bytes a second from a device, in one direction")
      .at_least(0)
      .at_most(kMost);
}

void Cluster::declare(config::Section& section) {
  section.key("nodes", nodes, "hosts of equal devices").at_least(1);
  section.key("devices_per_node", devices_per_node, "devices of each")
      .at_least(0);
  section.section("device", device, "each of them");
  section.section("in_node", in_node, "between devices of a node");
  section.section("between_nodes", between_nodes, "between those of two");
}

c10::DeviceType Cluster::device_type() const {
  return device.kind == "cuda" ? c10::kCUDA : c10::kCPU;
}

void Cluster::check_world(int64_t ranks, const std::string& what) const {
  TS_CHECK_CONFIG(
      ranks <= num_devices(), what, " more than the cluster has: nodes ", nodes,
      " x devices_per_node ", devices_per_node, " = ", num_devices(), ".");
}

int64_t Cluster::memory_bytes() const {
  return static_cast<int64_t>(device.memory_gib * (int64_t{1} << 30));
}

const ClusterLink& Cluster::link_along(mesh::Axis axis,
                                       const mesh::DeviceMesh& mesh) const {
  const bool is_in_nodes = mesh.world_size() <= devices_per_node ||
                           mesh.degree(axis) == 1 ||
                           !leaves_a_node(axis, mesh, devices_per_node);
  return is_in_nodes ? in_node : between_nodes;
}

engine::PlanCosts Cluster::costs(const mesh::DeviceMesh& mesh) const {
  engine::PlanCosts costs;
  costs.device = program::Device{.flops = flops()};
  if (device.memory_gb_per_s > 0) {
    costs.device->memory_bytes = device.memory_gb_per_s * kGiga;
  }
  const bool is_one_node = mesh.world_size() <= devices_per_node;
  costs.links[""] = link_of(is_one_node ? in_node : between_nodes);
  for (size_t i = 0; i < mesh::kNumAxes; ++i) {
    const auto axis = static_cast<mesh::Axis>(i);
    if (mesh.degree(axis) == 1) continue;
    costs.links[mesh::name_of(axis)] = link_of(link_along(axis, mesh));
  }
  return costs;
}

Cluster read_cluster(const std::string& path) {
  TS_CHECK_CONFIG(std::filesystem::is_regular_file(path), path,
                  ": there is no such description of a cluster.");
  Cluster cluster;
  config::Section root;
  cluster.declare(root);
  config::resolve(root, tessera::detail::read_json_text(path), path, {});
  require(cluster.devices_per_node > 0, path, "devices_per_node",
          "how many devices a node has");
  require(cluster.device.tflops >= kLeast, path, "device.tflops",
          "10^12 operations a second that products reach");
  require(cluster.device.memory_gib > 0, path, "device.memory_gib",
          "what a rank may hold");
  require(cluster.devices_per_node == 1 || cluster.in_node.gb_per_s >= kLeast,
          path, "in_node.gb_per_s", "how fast devices of a node talk");
  require(cluster.nodes == 1 || cluster.between_nodes.gb_per_s >= kLeast, path,
          "between_nodes.gb_per_s", "how fast nodes talk");
  TS_CHECK_CONFIG(cluster.nodes <= kMostDevices / cluster.devices_per_node,
                  path, ": nodes ", cluster.nodes, " x devices_per_node ",
                  cluster.devices_per_node, " are more than the ", kMostDevices,
                  " devices that plans are made for.");
  return cluster;
}

}  // namespace tessera::planner
