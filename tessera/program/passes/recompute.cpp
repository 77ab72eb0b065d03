#include <set>
#include <utility>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

Program recompute(const Program& program, const Units& units) {
  Program lowered;
  std::set<std::pair<int64_t, int64_t>> done;  // micro-batch, unit
  for (const auto& instruction : program) {
    const bool is_backward =
        is_compute(instruction.op) && instruction.op != Op::kForward;
    if (is_backward && instruction.unit >= 0 &&
        units.all[instruction.unit].recomputed &&
        done.emplace(instruction.microbatch, instruction.unit).second) {
      lowered.push_back(instruction);
      lowered.back().op = Op::kRecompute;
    }
    lowered.push_back(instruction);
  }
  return lowered;
}

}  // namespace tessera::program::passes
