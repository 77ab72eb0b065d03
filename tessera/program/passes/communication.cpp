#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

// What follows one another directly and is of one kind is begun together, then
// awaited: ranks that send to each other at once do not wait for each other for
// ever, even where a send waits for its receive.
bool go_together(Op one, Op other) {
  return (is_message(one) && is_message(other)) || one == other;
}

bool is_whole(const Instruction& each) {
  return is_communication(each.op) && each.phase == Phase::kWhole;
}

}  // namespace

Program communication(const Program& program, const Units& /*units*/) {
  Program lowered;
  for (size_t i = 0; i < program.size();) {
    if (!is_whole(program[i])) {
      lowered.push_back(program[i++]);
      continue;
    }
    size_t end = i;
    while (end < program.size() && is_whole(program[end]) &&
           go_together(program[i].op, program[end].op)) {
      lowered.push_back(begin(program[end++]));
    }
    for (; i < end; ++i) lowered.push_back(await(program[i]));
  }
  return lowered;
}

}  // namespace tessera::program::passes
