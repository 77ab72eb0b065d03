// When the instructions of all ranks begin and end: the programs that the
// executor runs, with times (costs.h) in place of a model.
//
// Ranks: each does its instructions one after the other; an await ends when
//        what it waits for is there.
// Lanes: the collectives of a group run one after the other, in the order in
//        which they were begun, each from when all of the group have begun it.
//        A message goes off when its send begins, behind those that this rank
//        has sent to the same one before, and whoever receives has room for it:
//        its send is over when its last byte is off. What lies in files is read
//        and written in order. All of these go on beside the ranks.
// Cost:  of time and memory, instructions: ranks that world.h follows as one
//        are one here too.
// REQUIRES: programs that check(world) takes. What does not come to its end
//        here, or sends what nobody receives, is refused by name
//        (TORCH_INTERNAL_ASSERT: a programmer's error).
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/program/costs.h"
#include "tessera/program/memory.h"
#include "tessera/program/world.h"

namespace tessera::program {

struct Timing {
  double begin = 0, end = 0;
};

// What a rank has spent until it ends a step (kNextVersion).
struct StepEnd {
  double time = 0;
  double work = 0, bubble = 0, exposed = 0, files = 0;
};

// Of the ranks that are like this one. Their step is work + bubble + exposed +
// files.
struct RankTimes {
  int64_t rank = 0;        // the lowest of them
  int64_t num_ranks = 0;   // that they are
  std::vector<Timing> at;  // by instruction; of an await, how long it waits
  double work = 0;
  // It waits for other stages: for messages, for what it does in one group with
  // them (the norm), and for the end of the step.
  double bubble = 0;
  double exposed = 0;  // it waits for collectives of its own stage
  double files = 0;    // it waits for these
  // Micro-batches go through it.
  Timing busy;
  std::vector<StepEnd> step_ends;  // of steps that go on without a flush
};

struct Simulation {
  double step = 0;  // until the last rank ends
  std::vector<RankTimes> classes;
  std::vector<int64_t> class_of;  // by rank

  const RankTimes& of(int64_t rank) const {
    return classes.at(class_of.at(rank));
  }
  // Over all ranks: the mean share of the step that is bubble.
  double bubble() const;
};

Simulation simulate(const World& world, const Costs& costs);

// What a rank holds from when on.
struct Level {
  double time = 0;
  int64_t bytes = 0;
};
// The most while each instruction runs, and what is alive behind it.
// REQUIRES: both of one program.
std::vector<Level> levels_of(const RankTimes& times, const Memory& memory);

}  // namespace tessera::program
