// The programs of a module whose own code says what is computed: one for a
// forward, one for a backward, which the trainer's passes spell out of the
// order in which forwards use the module's units.
//
// Owners: units that own parameters, gathered and reduced as one; owner 0 has
//         those that are left when all others took theirs, and is there
//         throughout. A visit is a run of uses of one owner; one that is
//         visited again stays gathered from its first visit to its last.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/instruction.h"
#include "tessera/program/units.h"

namespace tessera::wrappers {

struct PassOptions {
  bool reshard_after_forward = true;
  int64_t prefetch = 1;
  bool alone = false;  // a world of one rank
};

// Gathers, frees, allocations and reductions alone.
struct PassPrograms {
  program::Program forward;     // that is trained on
  std::vector<bool> held;       // by owner: gathered behind it
  program::Program backward;    // begins there, and leaves none gathered
  program::Program completion;  // behind the last backward of a step
  program::Program evaluation;  // a forward alone; leaves none gathered
};

// `owners`: whose `reads` are filled in here. `visits`: owners but 0, in the
// order of the forward.
PassPrograms pass_programs(std::vector<program::Unit> owners,
                           const std::vector<int64_t>& visits,
                           const PassOptions& options);

}  // namespace tessera::wrappers
