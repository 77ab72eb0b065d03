// Proves a program sound before it runs.
//
// Rules: every micro-batch gets its inputs (loaded or received), goes forward
//        once, gets its targets or gradients, and goes backward once, through
//        the units in order and back; what it computed is sent on, once;
//        gradients are zeroed before the first backward, complete before they
//        are clipped, clipped before the optimizer's one step.
//        Over units: a unit runs while the parameters that it reads are
//        gathered, none is gathered or freed twice, and none stays gathered in
//        stage 3; gradients are reduced behind the last backward that adds to
//        them, once, and in stages 2 and 3 once for each micro-batch.
//        Over stages: between two ranks every send meets its receive, in the
//        same order, and all programs come to their end where a send waits for
//        its receive.
// Errors: TORCH_INTERNAL_ASSERT names the instruction and the rule: a schedule
//        that breaks one is a programmer's error.
#pragma once

#include <vector>

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

// `units` as the program was made with; empty: it names whole chunks.
Proof check(const Program& program, const Units& units = {});

// The programs of all stages of a pipeline, whose messages must meet.
void check_messages(const std::vector<Program>& stages);

}  // namespace tessera::program
