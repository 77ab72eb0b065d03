// The section monitor of the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::monitor {

struct MonitorConfig {
  int64_t every = 10;
  int64_t losses_late = 0;
  bool tensorboard = true;
  bool by_rank = false;
  int64_t trace = 0;
  int64_t replicas = 100;
  int64_t reruns = 0;
  int64_t sample = 0;
  std::string sample_prompt;
  int64_t sample_tokens = 64;
  double sample_temperature = 0.8;
  void declare(config::Section& section);
};

}  // namespace tessera::monitor
