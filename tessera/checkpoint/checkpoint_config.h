// The section checkpoint of the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::checkpoint {

struct CheckpointConfig {
  int64_t every = 500;  // 0: none
  int64_t keep = 2;     // 0: all
  bool keep_best = false;
  bool async = false;
  std::string dir = "";     // "": checkpoints/ in the run folder
  int64_t local_every = 0;  // 0: none
  std::string local_dir = "/dev/shm";
  void declare(config::Section& section);
  // Beside that of a run that is stopped.
  bool saves() const { return every > 0 || keep_best; }
  // In the memory of hosts.
  bool saves_locally() const { return local_every > 0; }
};

}  // namespace tessera::checkpoint
