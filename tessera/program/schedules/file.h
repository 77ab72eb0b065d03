// A schedule as text, read and written: one for a shape.
//
// Form:   "stages 2, chunks 1, microbatches 3", then one line a stage, from
//         stage 0, of its turns: tasks F, B, I and W (forward, backward, the
//         inputs' part and the weights') with the number of the micro-batch
//         and, of another chunk than 0, ".1" ...; "+" joins tasks of a turn.
//         The first line may go on with ", placement v" (or mirrored).
//         Behind "#" is a comment; lines without anything else are left out.
//           stages 2, chunks 1, microbatches 3
//           F0 F1 B0 F2 B1 B2
//           F0 I0 F1 I1 W0 F2 I2 W1 W2
// Rules:  each micro-batch goes forward once through each chunk, and then
//         backward, whole or in its two parts; of mirrored stages through one
//         chunk, the same on all. No rank waits for ever.
//         A stage is one line, which all of its ranks run: who gives one to
//         several ranks, by a further line or a word "ranks", is refused.
// Errors: TS_CHECK_CONFIG names the file, the line and the rule.
#pragma once

#include <string>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

// Whether a name of pipeline.schedule is a file's: a path, or one that ends in
// ".txt".
bool names_file(const std::string& name);

Schedule read_schedule(const std::string& path);

// REQUIRES: takes(schedule, shape).
std::string written(const Schedule& schedule, const Shape& shape);

}  // namespace tessera::program::schedules
