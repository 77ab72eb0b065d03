// tessera plan --cluster: the fastest layouts of a run on a cluster.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"
#include "tessera/planner/cluster.h"

namespace tessera::cli {

struct SearchFlags {
  int64_t world = 1;  // ranks
  int64_t top = 5;
  std::string emit;  // the first plan's configuration goes there; "": nowhere
  std::string json;
};

// Prints them. `config`: not completed; keys that `origins` knows as set are
// kept.
void search_plans(const engine::RunConfig& config,
                  const config::Provenance& origins,
                  const planner::Cluster& cluster, const SearchFlags& flags);

}  // namespace tessera::cli
