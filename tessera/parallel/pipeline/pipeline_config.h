// The section pipeline of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/program/placement.h"

namespace tessera::parallel::pipeline {

struct PipelineConfig {
  std::string schedule = "1f1b";
  int64_t chunks = 0;               // 0: as many as the schedule needs
  std::vector<int64_t> split = {};  // layers of each stage; empty: even
  std::string order = "reverse";    // of gpipe's backwards

  int64_t num_chunks() const;
  program::Placement placement() const;
  // Of p ranks: where its virtual stages lie.
  program::Pipeline pipeline(int64_t stages) const;
  void declare(config::Section& section);
};

}  // namespace tessera::parallel::pipeline
