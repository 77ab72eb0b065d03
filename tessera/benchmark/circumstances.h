// Where and how something was measured, for whoever reads the figures later.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/detail/json.h"

namespace tessera::benchmark {

struct Circumstances {
  std::string command;
  std::string host;
  std::string processor;
  std::string vectors = {};    // the widest; "": not told
  int64_t cores = 0;           // that those who were measured may use
  int64_t ranks = 0;           // 0: it was a process by itself
  std::string ranks_are = {};  // "processes of this host", "threads" ...
  int64_t threads = 0;         // of each; 0: not told
  std::string build;           // versions
};

// Three lines that begin with "#".
std::string heading_of(const Circumstances& around);
// A key for each that is told.
tessera::detail::Json json_of(const Circumstances& around);

}  // namespace tessera::benchmark
