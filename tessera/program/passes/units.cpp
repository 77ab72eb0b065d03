#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

Program units(const Program& program, const Units& units) {
  if (units.chunks.empty()) return program;
  Program lowered;
  for (const auto& instruction : program) {
    if (!is_compute(instruction.op) && instruction.op != Op::kLoss) {
      lowered.push_back(instruction);
      continue;
    }
    const auto& chunk = units.chunks.at(instruction.chunk);
    const auto push = [&](int64_t unit) {
      // The first unit's input, token ids, has no gradient: all of its backward
      // is the weights'.
      if (instruction.op == Op::kBackwardInput && unit == 0) return;
      lowered.push_back(instruction);
      lowered.back().unit = unit;
      if (instruction.op == Op::kBackwardWeight && unit == 0) {
        lowered.back().op = Op::kBackward;
      }
    };
    if (instruction.op == Op::kLoss) {
      push(chunk.back());
    } else if (instruction.op == Op::kForward) {
      for (auto unit = chunk.begin(); unit != chunk.end(); ++unit) push(*unit);
    } else {
      for (auto unit = chunk.rbegin(); unit != chunk.rend(); ++unit) {
        push(*unit);
      }
    }
  }
  return lowered;
}

}  // namespace tessera::program::passes
