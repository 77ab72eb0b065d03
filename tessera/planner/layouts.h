// The layouts that a search looks at: every way to lay a model out over a
// cluster that its sizes and the batch allow, with a bound and a guess of what
// a step takes.
//
// Keys:  mesh.pp, tp, cp, ep, dp_replicate, dp_shard; zero.stage;
//        tensor.sequence_parallel (where tp cuts it evenly); batch.micro,
//        powers of 2; pipeline.schedule, chunks and cut. recompute.mode costs
//        time, and is the search's to choose by memory. A key that the user
//        has set keeps its value.
// Left:  ranks of tp beyond a node, which every layer would wait for; of
//        several data-parallel ranks zero.stage 0, which holds more than stage
//        1 and moves as much; hybrid shards but for those of a node.
// Time:  seconds. No layout takes less than its bound: operations shared out
//        evenly, what tp moves beside them, and the least bubble that 1f1b has,
//        cut in any way; of ranks that are not equally fast operations alone,
//        shared out by mesh.speeds. The guess has the bubble of equal stages,
//        and adds what other groups move, as if nothing hid it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/planner/cluster.h"

namespace tessera::planner {

// Whether the user has set this key.
using IsSet = std::function<bool(const std::string& key)>;

// Operations of a token, forward and backward. To be counted once: a model is
// made for it.
struct TokenFlops {
  explicit TokenFlops(const engine::RunConfig& base);
  double all = 0;
  double attention = 0, head = 0;  // of these

  // Where the sequence is cut into pieces, which know the keys that lie ahead
  // of all their queries.
  double of_pieces(int64_t cp) const;
  // By what a layout takes longer, at least, where recompute.mode is `mode`;
  // `every`: recompute.every.
  double recompute_factor(const std::string& mode, int64_t every) const;
};

// Of a run's ranks, by mesh.speeds: by which a step is simulated where they
// differ.
double mean_speed_of(const engine::RunConfig& base);

struct Layout {
  int64_t pp = 1, tp = 1, cp = 1, ep = 1;
  int64_t dp_replicate = 0, dp_shard = 0;  // 0, both: as the user has set them
  int64_t zero_stage = 0;
  int64_t micro = 1;
  std::string schedule = "";  // "": as it is
  int64_t chunks = 0;
  double bound = 0;
  double guess = 0;

  // The run laid out so; not completed.
  engine::RunConfig of(const engine::RunConfig& base,
                       const IsSet& is_set) const;
};

// In the order of their guesses. `base`: the run, of which these are ways to
// lay it out.
std::vector<Layout> layouts_of(const engine::RunConfig& base,
                               const Cluster& cluster, int64_t world_size,
                               const IsSet& is_set);

// "interleaved of 4 chunks". REQUIRES: a pipeline.
std::string schedule_text(const engine::RunConfig& config);

}  // namespace tessera::planner
