#include "tessera/program/instruction.h"

#include <c10/util/Exception.h>

namespace tessera::program {

const char* name_of(Op op) {
  switch (op) {
    case Op::kZeroGradients:
      return "ZeroGradients";
    case Op::kLoadInputs:
      return "LoadInputs";
    case Op::kLoadTargets:
      return "LoadTargets";
    case Op::kForward:
      return "Forward";
    case Op::kBackward:
      return "Backward";
    case Op::kBackwardReduce:
      return "BackwardReduce";
    case Op::kReduceGradients:
      return "ReduceGradients";
    case Op::kClipNorm:
      return "ClipNorm";
    case Op::kOptimizerStep:
      return "OptimizerStep";
  }
  TORCH_INTERNAL_ASSERT(false, "an op without a name");
}

std::string describe(const Instruction& instruction) {
  std::string text = name_of(instruction.op);
  if (instruction.microbatch >= 0) {
    text += " " + std::to_string(instruction.microbatch);
  }
  return text;
}

std::string describe(const Program& program) {
  std::string text;
  for (const auto& instruction : program) text += describe(instruction) + "\n";
  return text;
}

}  // namespace tessera::program
