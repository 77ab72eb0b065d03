// The section pipeline of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::parallel::pipeline {

struct PipelineConfig {
  std::string schedule = "1f1b";
  int64_t chunks = 1;
  std::vector<int64_t> split = {};  // layers of each stage; empty: even
  void declare(config::Section& section);
};

}  // namespace tessera::parallel::pipeline
