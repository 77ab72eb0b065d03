// Where a test of groups runs: a backend, processes or threads, a world.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace tessera::testing {

struct Where {
  std::string backend;
  bool processes = false;
  int64_t world = 2;
  std::string name() const {
    return backend + (processes ? "_processes_" : "_threads_") +
           std::to_string(world);
  }
  friend void PrintTo(const Where& where, std::ostream* out) {
    *out << where.name();
  }
};

inline void run_there(const Where& where, const RankBody& body) {
  if (where.processes) {
    run_processes(where.world, where.backend, body);
  } else {
    comm::run_threads(where.world, where.backend, body,
                      std::chrono::seconds(30));
  }
}

// shm and gloo, processes and threads, with each of these worlds.
inline std::vector<Where> everywhere(const std::vector<int64_t>& worlds) {
  std::vector<Where> all;
  for (const char* backend : {"shm", "gloo"}) {
    for (bool processes : {false, true}) {
      for (int64_t world : worlds) all.push_back({backend, processes, world});
    }
  }
  return all;
}

}  // namespace tessera::testing
