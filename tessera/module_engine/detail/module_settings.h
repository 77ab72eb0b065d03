// What a file of DeepSpeed's means for a module of a user's own: a run's
// configuration, of which only what such a module has is read.
#pragma once

#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/module_engine/module_engine.h"

namespace tessera::detail {

struct ModuleSettings {
  engine::RunConfig config;
  mesh::DeviceMesh mesh;
  int64_t accumulation = 1;
  std::string text;  // every key, its value and where that is from
  std::vector<std::string> notes, warnings;  // for the user, once
  bool has_experts = false;                  // the file says which
};

// Errors: TS_CHECK_CONFIG, the same on every rank.
ModuleSettings module_settings(const std::string& json, int64_t world_size,
                               const InitializeOptions& options);

// That a module has the experts that the file says, and no others.
void check_experts(torch::nn::Module& module, const ModuleSettings& settings);

}  // namespace tessera::detail
