// From a schedule's chunks to what a rank does: one pure function after the
// other, each of which says one thing more.
//
//   units          a chunk becomes its units, one after the other
//   recompute      what was not kept is computed again before its backward
//   sharding       ZeRO's gathers, frees and reductions, and the update by unit
//   communication  begin and await, one behind the other
//   prefetch       gathers begin earlier
//   reductions     reductions are awaited later
//   messages       messages are posted earlier and awaited later
//
// The first four say what happens, the last three when; each of these can be
// left out, and changes no bit. split_backward is for schedules and tests.
// Errors: TORCH_INTERNAL_ASSERT names pass, instruction and rule.
#pragma once

#include <string>
#include <vector>

#include "tessera/program/checker.h"
#include "tessera/program/instruction.h"
#include "tessera/program/units.h"

namespace tessera::program::passes {

Program units(const Program& program, const Units& units);
Program recompute(const Program& program, const Units& units);
Program sharding(const Program& program, const Units& units);
Program communication(const Program& program, const Units& units);
Program prefetch(const Program& program, const Units& units);
Program reductions(const Program& program, const Units& units);
Program messages(const Program& program, const Units& units);
// Of data parallelism on threads: the devices around device 0.
Program devices(const Program& program, const Units& units);
// Every backward becomes its two parts, one behind the other.
Program split_backward(const Program& program, const Units& units);

struct Pass {
  const char* name;
  Program (*run)(const Program& program, const Units& units);
  bool is_optional;
};
// In the order in which they run.
const std::vector<Pass>& all();

// All passes but the optional ones in `without`, the program checked behind
// each.
Program lower(Program program, const Units& units, Kind kind = Kind::kTraining,
              const std::vector<std::string>& without = {});

}  // namespace tessera::program::passes
