// The section comm of the configuration.
#pragma once

#include <c10/core/DeviceType.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/config.h"

namespace tessera::comm {

struct CommConfig {
  std::string backend = CommunicatorOptions().backend;
  std::string algorithm = CommunicatorOptions().algorithm;
  int64_t timeout_s = CommunicatorOptions().timeout / std::chrono::seconds(1);
  int64_t silence_s = CommunicatorOptions().silence / std::chrono::seconds(1);
  // No key: `backend` is of ranks that this build starts, and must be in it.
  bool is_of_this_build = true;
  void declare(config::Section& section);
  // Of the ranks that this process starts on its host, which has `num_gpus`:
  // throws TS_CHECK_CONFIG where backend nccl has a rank without a GPU of its
  // own.
  void check_gpus(const std::vector<c10::DeviceType>& devices,
                  int64_t num_gpus) const;
};

// Throws where TESSERA_COMM_TABLE is set and names no table: for those who are
// about to start ranks.
void check_tuning_table();

// What comm.algorithm may be.
std::vector<std::string> algorithm_choices();

}  // namespace tessera::comm
