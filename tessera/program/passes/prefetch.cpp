#include <algorithm>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

bool begins_gather(const Instruction& each) {
  return each.op == Op::kGatherParameters && each.phase == Phase::kBegin;
}

// What an instruction changes in the bytes that are gathered or on their way.
// Below stage 3 they are always there.
int64_t change_of(const Instruction& each, const Units& units) {
  if (each.unit < 0 || units.all[each.unit].zero_stage < 3) return 0;
  if (begins_gather(each)) return units.all[each.unit].bytes;
  if (each.op == Op::kFreeParameters) return -units.all[each.unit].bytes;
  return 0;
}

// A gather of `unit` begins behind this: here it is freed, or awaited, or the
// gather before it begins, or a step ends.
bool is_barrier(const Instruction& each, int64_t unit) {
  const bool of_unit =
      each.op == Op::kGatherParameters || each.op == Op::kFreeParameters;
  return (of_unit && each.unit == unit) || begins_gather(each) ||
         each.op == Op::kNextVersion;
}

// Where a gather of `unit` behind this program may begin: right before the unit
// that runs units.prefetch earlier, behind the gather before it, or first of
// all, as far as the bytes allow; so the first ones do not wait for activations
// to come. `held`: bytes behind the program.
size_t earlier(const Program& program, int64_t unit, int64_t held,
               const Units& units) {
  const int64_t room = units.prefetch_bytes - units.all[unit].bytes;
  size_t place = program.size();
  int64_t passed = 0;
  for (size_t i = program.size(); i > 0 && passed < units.prefetch; --i) {
    const Instruction& before = program[i - 1];
    if (held > room) break;
    if (is_barrier(before, unit)) return i;
    held -= change_of(before, units);
    if (i > 1 && !is_compute(before.op)) continue;
    ++passed;
    place = i - 1;
  }
  return place;
}

}  // namespace

Program prefetch(const Program& program, const Units& units) {
  if (units.chunks.empty() || units.prefetch == 0) return program;
  Program lowered;
  int64_t held = 0;
  for (const auto& instruction : program) {
    size_t place = lowered.size();
    if (begins_gather(instruction)) {
      place = earlier(lowered, instruction.unit, held, units);
    }
    lowered.insert(lowered.begin() + static_cast<int64_t>(place), instruction);
    held += change_of(instruction, units);
  }
  return lowered;
}

}  // namespace tessera::program::passes
