// A training step is a program: a list of instructions for each rank.
//
// A schedule is a pure function that makes the list; the executor runs it; the
// checker proves it sound. Instructions name micro-batches, never tensors.
// Messages that follow one another directly are posted together, and the rank
// goes on when all of them have arrived: ranks that send to each other at once
// do not wait for each other for ever, even where a send waits for its receive.
// Source: the idea of a schedule as data, Huang et al. 2019 (GPipe) and
//         Narayanan et al. 2019 (PipeDream), as written in many training
//         systems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::program {

enum class Op {
  kZeroGradients,
  kLoadInputs,        // of a micro-batch
  kLoadTargets,       // of a micro-batch
  kForward,           // of a micro-batch
  kBackward,          // of a micro-batch; gradients accumulate on this rank
  kGatherParameters,  // of a unit, from the ranks that shard them
  kFreeParameters,    // of a unit: its own shard stays
  kReduceGradients,   // of a unit, over the ranks that share them: begins
  kAwaitGradients,    // until all that was begun is complete
  kSendActivations,   // of a micro-batch, from a chunk to the next stage's
  kReceiveActivations,
  kSendGradients,  // of a micro-batch's activations, to the stage before
  kReceiveGradients,
  kClipNorm,
  kOptimizerStep,
};

struct Instruction {
  Op op;
  int64_t microbatch = -1;  // -1: of the whole step
  int64_t unit = -1;        // -1: of the whole chunk; see units.h
  int64_t chunk = 0;  // of those that a rank holds; see schedules/pipeline.h
  bool operator==(const Instruction&) const = default;
};

bool is_message(Op op);

// Whom a message of a stage concerns. Chunk c of stage s of p is virtual stage
// c p + s; activations go up, gradients down.
struct Ends {
  bool sends = false;
  bool activations = false;
  int64_t sender = 0, receiver = 0;  // virtual stages
  int64_t peer() const { return sends ? receiver : sender; }
};
// REQUIRES: is_message(message.op).
Ends ends_of(const Instruction& message, int64_t stage, int64_t stages);

using Program = std::vector<Instruction>;

const char* name_of(Op op);
// "Forward 3", "Forward 3 unit 1", "OptimizerStep".
std::string describe(const Instruction& instruction);
// One line an instruction.
std::string describe(const Program& program);

}  // namespace tessera::program
