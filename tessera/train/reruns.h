// Steps that are computed several times before they update, for processors that
// compute wrongly now and then, or always: the rank's own gradients, behind
// each backward and before anything is reduced, are to have the same bits.
//
// Twice by the same rank, and once by the rank before it (each data-parallel
// rank takes the samples of the next one): what differs in one of them alone
// was transient, and is told; what differs again between two ranks that each
// repeat it, or each time, is persistent, and ends the run. To tell these
// apart, and which of two ranks it is, samples are then taken once more by the
// rank before, and once by the one before that.
// With one data-parallel rank, ranks with other processors or threads, unequal
// shares of a batch, replicas that lie on hosts in other ways, or with experts,
// whose sums over ranks are in another order then, no rank takes another one's:
// what one always computes alike, and wrongly, stays unseen.
//
// Comm:   collective over `world`: steps without an update, and an all_gather
//         of seven numbers a rank.
// Errors: TS_CHECK on every rank, of what is persistent.
// Source: Megatron-LM's rerun state machine (--rerun-mode validate_results),
//         which asks other devices by starting the job again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/engine/rank_model.h"

namespace tessera::train {

// What a rank computed of whose samples: hashes of its gradients.
struct Rerun {
  int64_t rank = 0;
  int64_t next = 0, after = 0;  // data-parallel ranks behind it; or itself
  uint64_t own = 0, own_again = 0, of_next = 0;
  uint64_t of_next_again = 0, of_after = 0;  // where anything differs
};

struct RerunVerdict {
  bool differs = false;
  std::vector<int64_t> transient, persistent;  // ranks, ascending
};

// Of all ranks, in order. REQUIRES: all five where the first three differ.
RerunVerdict verdict_on(const std::vector<Rerun>& all);

class Reruns {
 public:
  // Before every so many steps; 0: never. REQUIRES: `model` outlives this, and
  // trains with a schedule that flushes.
  Reruns(int64_t every, const engine::RunConfig& config,
         engine::RankModel& model, comm::Group& world);

  bool is_due(int64_t step) const { return every_ > 0 && step % every_ == 0; }
  // Of the step that comes next, numbered from 1; what is transient is told.
  // REQUIRES: no step is under way.
  void check(int64_t step, const engine::StepInput& input);

 private:
  struct Gradient {
    std::string parameter;
    int64_t microbatch = 0;
    uint64_t hash = 0;
  };
  std::vector<Gradient> compute(engine::StepInput input);
  // Of the samples of the rank so many places on.
  engine::StepInput of_other(engine::StepInput input, int64_t places) const;
  int64_t rank_on(int64_t places) const;
  std::vector<Rerun> all_of(const Rerun& mine);
  static void tell_place(int64_t step, const std::vector<Gradient>& first,
                         const std::vector<Gradient>& second);

  const int64_t every_;
  engine::RankModel& model_;
  comm::Group& world_;
  bool exchanges_ = false;
};

}  // namespace tessera::train
