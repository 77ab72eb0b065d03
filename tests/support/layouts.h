// Options of ranks on made-up hosts, and on one.
#pragma once

#include <string>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

// Ranks on hosts: "aabb" are two of two ranks each.
inline comm::CommunicatorOptions on_hosts(
    const std::string& hosts, const std::string& algorithm = "hierarchical") {
  comm::CommunicatorOptions options{
      .backend = "gloo",
      .algorithm = algorithm,
      .world_size = static_cast<int64_t>(hosts.size()),
      .local_world_size = 1,
      .timeout = std::chrono::seconds(30)};
  for (char host : hosts) options.hosts.emplace_back(1, host);
  return options;
}

inline comm::CommunicatorOptions on_one_host(const std::string& backend,
                                             int64_t ranks,
                                             const std::string& algorithm) {
  return {.backend = backend,
          .algorithm = algorithm,
          .world_size = ranks,
          .local_world_size = ranks,
          .timeout = std::chrono::seconds(30)};
}

}  // namespace tessera::testing
