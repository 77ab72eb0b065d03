// Proves a rank's program sound before it runs; world.h proves that the
// programs of all ranks go together.
//
// Rules: every micro-batch gets its inputs (loaded or received), goes forward
//        once, gets its loss or its gradients, and goes backward once, through
//        the units in order and back; what it computed is sent on, once. The
//        batch of the next step is shared once, where one rank reads it.
//        Nothing is used before it was awaited, begun twice, or left begun.
//        A unit runs while the parameters that it reads are gathered; none is
//        gathered or freed twice, freed while on its way, or stays gathered in
//        stage 3. Gradients are zeroed before the first backward, allocated
//        where they live as shards, reduced behind the last backward that adds
//        to them, once, and in stages 2 and 3 once for each micro-batch, or for
//        those together to which several units here add in turn;
//        complete before the norm is taken, which is before they are clipped,
//        which is before the optimizer's one step of each unit, and before
//        what that step needs whole is gathered for it, once. What lies in
//        files is used between the await of its fetch and its release alone,
//        and nothing stays fetched.
// Errors: TORCH_INTERNAL_ASSERT names the instruction, its place and the rule:
//        a schedule or a pass that breaks one is a programmer's error.
#pragma once

#include <cstdint>

#include "tessera/program/instruction.h"
#include "tessera/program/units.h"

namespace tessera::program {

struct Proof {
  int64_t num_microbatches = 0;
  // The most micro-batches between their forward and their backward, each
  // chunk's counted.
  int64_t peak_alive = 0;
  // Parameters gathered over the step, and the most at a time, in units.
  int64_t gathers = 0;
  int64_t peak_gathered = 0;
};

// `units` as the program was made with; without chunks: it names whole chunks.
Proof check(const Program& program, const Units& units = {},
            Purpose purpose = Purpose::kTraining);

}  // namespace tessera::program
