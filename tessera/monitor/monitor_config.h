// The section monitor of the configuration.
#pragma once

#include <cstdint>

#include "tessera/core/config.h"

namespace tessera::monitor {

struct MonitorConfig {
  int64_t every = 10;
  bool tensorboard = true;
  int64_t trace = 0;
  void declare(config::Section& section);
};

}  // namespace tessera::monitor
