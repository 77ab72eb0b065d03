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
    case Op::kGatherParameters:
      return "GatherParameters";
    case Op::kFreeParameters:
      return "FreeParameters";
    case Op::kReduceGradients:
      return "ReduceGradients";
    case Op::kAwaitGradients:
      return "AwaitGradients";
    case Op::kSendActivations:
      return "SendActivations";
    case Op::kReceiveActivations:
      return "ReceiveActivations";
    case Op::kSendGradients:
      return "SendGradients";
    case Op::kReceiveGradients:
      return "ReceiveGradients";
    case Op::kClipNorm:
      return "ClipNorm";
    case Op::kOptimizerStep:
      return "OptimizerStep";
  }
  TORCH_INTERNAL_ASSERT(false, "an op without a name");
}

bool is_message(Op op) {
  return op == Op::kSendActivations || op == Op::kReceiveActivations ||
         op == Op::kSendGradients || op == Op::kReceiveGradients;
}

std::string describe(const Instruction& instruction) {
  std::string text = name_of(instruction.op);
  if (instruction.microbatch >= 0) {
    text += " " + std::to_string(instruction.microbatch);
  }
  if (instruction.chunk > 0) text += c10::str(" chunk ", instruction.chunk);
  if (instruction.unit >= 0) text += c10::str(" unit ", instruction.unit);
  return text;
}

std::string describe(const Program& program) {
  std::string text;
  for (const auto& instruction : program) text += describe(instruction) + "\n";
  return text;
}

}  // namespace tessera::program
