// What a plan is made for: nodes of equal devices, and what links them.
//
//   {"nodes": 16, "devices_per_node": 8,
//    "device": {"tflops": 600, "memory_gib": 72, "memory_gb_per_s": 3000},
//    "in_node": {"latency_us": 5, "gb_per_s": 400},
//    "between_nodes": {"latency_us": 15, "gb_per_s": 50}}
//
// Units: rates are those that are reached, not those of a data sheet: 10^12
//        operations a second in the run's type, 10^9 bytes a second in one
//        direction, of each device. Memory: what a rank may hold, in 2^30
//        bytes.
// Ranks: node after node; a rank has one device.
// Errors: TS_CHECK_CONFIG, with file and key, and the line of what is there.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>

#include "tessera/core/config.h"
#include "tessera/engine/step_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::planner {

struct ClusterDevice {
  std::string kind = "cuda";
  double tflops = 0;
  double memory_gib = 0;
  double memory_gb_per_s = 0;  // 0: that memory takes no time
  void declare(config::Section& section);
};

struct ClusterLink {
  double latency_us = 0;
  double gb_per_s = 0;
  void declare(config::Section& section);
};
// In seconds and bytes.
program::Link link_of(const ClusterLink& link);

struct Cluster {
  int64_t nodes = 1;
  int64_t devices_per_node = 0;
  ClusterDevice device;
  ClusterLink in_node, between_nodes;
  void declare(config::Section& section);

  c10::DeviceType device_type() const;
  int64_t num_devices() const { return nodes * devices_per_node; }
  // TS_CHECK_CONFIG where it has fewer devices; `what` asks for so many ranks,
  // as the message begins: "--world 9 is".
  void check_world(int64_t ranks, const std::string& what) const;
  int64_t memory_bytes() const;                          // of a device
  double flops() const { return device.tflops * 1e12; }  // a second, of one
  // The link over which ranks that differ along an axis talk.
  const ClusterLink& link_along(mesh::Axis axis,
                                const mesh::DeviceMesh& mesh) const;
  // Of a step of that mesh, in seconds.
  engine::PlanCosts costs(const mesh::DeviceMesh& mesh) const;
};

Cluster read_cluster(const std::string& path);

}  // namespace tessera::planner
