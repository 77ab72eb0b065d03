// tessera plan --draw: a step of a mesh before it is run, simulated and drawn.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/planner/cluster.h"

namespace tessera::cli {

struct DrawFlags {
  std::string svg, trace;
  std::string times, device;
  std::vector<std::string> links;

  bool say_costs() const {
    return !times.empty() || !device.empty() || !links.empty();
  }
};

void add_drawing(CLI::App& command, DrawFlags& flags);

// Prints it. `config`: completed. What the step costs is as the cluster, or
// else the flags, say. `json`: each instruction goes there; "": nowhere.
void draw_step(const engine::RunConfig& config,
               const std::optional<planner::Cluster>& cluster,
               const DrawFlags& flags, const std::string& json);

}  // namespace tessera::cli
