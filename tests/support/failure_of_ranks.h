// What ranks fail with, as threads of this process over shm.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace tessera::testing {

// The words of the first failure; "" where there is none.
inline std::string failure_of_ranks(
    int64_t world, const std::function<void(comm::Communicator&)>& body) {
  try {
    comm::run_threads(world, "shm", body);
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

}  // namespace tessera::testing
