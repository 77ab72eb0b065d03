// The section monitor of the configuration.
#pragma once

#include <cstdint>

#include "tessera/core/config.h"

namespace tessera::monitor {

struct MonitorConfig {
  int64_t every = 10;
  bool tensorboard = true;
  bool trace = false;
  void declare(config::Section& section);
};

}  // namespace tessera::monitor
