#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

Program devices(const Program& program, const Units& units) {
  if (units.devices == 1) return program;
  Program lowered;
  for (const auto& instruction : program) {
    if (instruction.op == Op::kZeroGradients) {
      lowered.push_back({Op::kReplicateParameters});
    }
    if (instruction.op == Op::kNorm) lowered.push_back({Op::kReduceReplicas});
    lowered.push_back(instruction);
  }
  return lowered;
}

}  // namespace tessera::program::passes
