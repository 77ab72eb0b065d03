#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

// The messages behind a backward travel while the weights' part runs: the stage
// before does not wait for it.
Program split_backward(const Program& program, const Units& /*units*/) {
  Program split;
  for (size_t i = 0; i < program.size(); ++i) {
    const Instruction whole = program[i];
    split.push_back(whole);
    if (whole.op != Op::kBackward) continue;
    split.back().op = Op::kBackwardInput;
    Program awaits;
    while (i + 1 < program.size() && is_message(program[i + 1].op)) {
      const Instruction& message = program[++i];
      if (message.phase != Phase::kAwait) split.push_back(begin(message));
      if (message.phase != Phase::kBegin) awaits.push_back(await(message));
    }
    split.push_back(whole);
    split.back().op = Op::kBackwardWeight;
    split.insert(split.end(), awaits.begin(), awaits.end());
  }
  return split;
}

}  // namespace tessera::program::passes
