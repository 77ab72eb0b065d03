// What ranks of a sharded module do next, which they do together.
//
// Before each part of a pass every rank says what it is at: ranks that do
// different things would wait for each other for ever. Who has to begin a part
// again says so, and the others repeat it; who has joined hears what the others
// are at.
// Comm:    one all_gather of an int64 each time.
// Errors:  TS_CHECK on every rank, with two ranks and what they are at.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/wrappers/detail/pass_follower.h"

namespace tessera::wrappers {

enum class Act : int64_t {
  kNothing,  // it has joined
  kForward,
  kEvaluation,
  kOrder,  // of units, after a first forward
  kBackward,
  kAccumulated,  // a backward has ended, which was not a step's last
  kReduced,      // it was
  kClip,
  // What only some ranks have to begin again.
  kForwardAgain,
  kEvaluationAgain,
  kBackwardAgain,
};

Act act_of(Part part, bool again);
Part part_of(Act act);

// What all ranks that have data are at, and how many have.
struct Agreed {
  Act act = Act::kNothing;
  int64_t active = 0;
  int64_t first = 0;  // of these, as the group counts
};

// `repeat`: a part, for others that begin it again.
Agreed agree(Act mine, comm::Group& group,
             const std::function<void(Part)>& repeat);

}  // namespace tessera::wrappers
