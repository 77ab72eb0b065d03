// A training step is a program: a list of instructions for each rank.
//
// A schedule is a pure function that makes the list; the executor runs it; the
// checker proves it sound. Instructions name micro-batches, never tensors.
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
  kLoadInputs,       // of a micro-batch
  kLoadTargets,      // of a micro-batch
  kForward,          // of a micro-batch
  kBackward,         // of a micro-batch; gradients accumulate on this rank
  kBackwardReduce,   // the step's last backward: gradients are reduced over the
                     // data-parallel ranks as they become ready
  kReduceGradients,  // waits until that reduction is complete
  kClipNorm,
  kOptimizerStep,
};

struct Instruction {
  Op op;
  int64_t microbatch = -1;  // -1: of the whole step
  bool operator==(const Instruction&) const = default;
};

using Program = std::vector<Instruction>;

const char* name_of(Op op);
// "Forward 3", "OptimizerStep".
std::string describe(const Instruction& instruction);
// One line an instruction.
std::string describe(const Program& program);

}  // namespace tessera::program
