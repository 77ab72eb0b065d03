#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

// What follows one another directly and is of one kind is begun together, then
// awaited: ranks that send to each other at once do not wait for each other for
// ever, even where a send waits for its receive.
bool go_together(Op one, Op other) {
  return (is_message(one) && is_message(other)) || one == other;
}

}  // namespace

Program communication(const Program& program, const Units& /*units*/) {
  Program lowered;
  for (size_t i = 0; i < program.size();) {
    if (!is_communication(program[i].op)) {
      lowered.push_back(program[i++]);
      continue;
    }
    size_t end = i;
    while (end < program.size() &&
           go_together(program[i].op, program[end].op)) {
      lowered.push_back(begin(program[end++]));
    }
    for (; i < end; ++i) lowered.push_back(await(program[i]));
  }
  return lowered;
}

}  // namespace tessera::program::passes
