// The fastest layouts that fit: of all that planner/layouts.h names, those that
// a bound does not rule out are laid out and simulated, the most promising
// first, until none that is left can be among the best.
//
// Memory: what the fullest rank holds, as engine/memory_plan.h has it, against
//         what the cluster says that a rank may hold. What does not fit is
//         tried with more of it computed again: recompute.mode none, selective,
//         block; but not where a floor of it (memory_floor.h) is too much.
// Time:   of a step, as engine/step_plan.h simulates it with the cluster's
//         rates and links.
// Errors: TS_CHECK_CONFIG where nothing fits, with what comes nearest; what is
//         refused of the run itself.
// Threads: several layouts at a time; what is found does not depend on it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/planner/cluster.h"
#include "tessera/planner/layouts.h"

namespace tessera::planner {

// A layout as it was simulated.
struct Plan {
  engine::RunConfig config;  // completed
  std::string mesh;          // in words
  double step_s = 0;
  double tokens_per_s = 0;
  double mfu = 0;      // 0..1 of the devices' rate, recomputation not counted
  double bubble = 0;   // shares of the step: waiting for other stages,
  double exposed = 0;  // and, at most, for collectives of its own stage
  int64_t peak_bytes = 0;   // of the fullest rank
  int64_t moved_bytes = 0;  // in a step, of the rank that moves most
};

// What is known of the layouts in which a key has a value.
struct Outcome {
  double best_s = 0;  // of those that were simulated; 0: none
  // The least bound of the others: ruled out, left, or not tried with this
  // recompute.mode; 0: there are none.
  double bound_s = 0;
  int64_t least_bytes = 0;  // of those laid out that do not fit
};
// By key and value, as flags have them: outcomes["mesh.tp"]["8"].
using Outcomes = std::map<std::string, std::map<std::string, Outcome>>;

struct Search {
  std::vector<Plan> plans;  // the fastest first, each of another mesh
  int64_t layouts = 0;      // that there are; of these:
  int64_t simulated = 0;
  int64_t too_large = 0;
  int64_t refused = 0;      // a rule of the configuration forbids it
  int64_t ruled_out = 0;    // by their bounds
  int64_t left = 0;         // not looked at, since `most` were
  double left_bound_s = 0;  // none of those is faster; 0: none is left
  Outcomes outcomes;
};

struct SearchOptions {
  int64_t world_size = 1;
  int64_t top = 5;
  int64_t most = 400;  // are laid out, once something fits
  // Hears what is found so far, now and then.
  std::function<void(const Search&)> progress = nullptr;
};

Search search(const engine::RunConfig& base, const Cluster& cluster,
              const SearchOptions& options, const IsSet& is_set);

// Why the first plan is that one, in sentences: what the best layout with each
// other value of a key would take, between its bound and what was simulated
// where these differ, or that none fits.
std::vector<std::string> reasons_of(const Search& search,
                                    const Cluster& cluster);

// What a change of the cluster is worth to a plan as it is: by its words the
// step's length over what it was.
struct Change {
  std::string what;  // "device.tflops twice as high"
  double step = 1;
};
// The most useful first.
std::vector<Change> changes_of(const Plan& plan, const Cluster& cluster);

}  // namespace tessera::planner
