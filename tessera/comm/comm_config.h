// The section comm of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::comm {

struct CommConfig {
  std::string backend = "auto";
  std::string algorithm = "auto";
  int64_t timeout_s = 600;
  void declare(config::Section& section);
};

// Throws where TESSERA_COMM_TABLE is set and names no table: for those who are
// about to start ranks.
void check_tuning_table();

// What comm.algorithm may be.
std::vector<std::string> algorithm_choices();

}  // namespace tessera::comm
