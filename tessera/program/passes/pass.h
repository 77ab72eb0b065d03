// From a schedule's chunks to what a rank does: one pure function after the
// other, each of which says one thing more.
//
//   devices        what goes to devices around device 0, and comes back
//   batches        the next step's samples are read by one rank of a group, and
//                  moved to the others while this step runs
//   split_backward a backward becomes its two parts, where it is asked for: in
//                  pipelines whose rows wait (nn/waiting_rows.h), always
//   units          a chunk becomes its units, one after the other
//   recompute      what was not kept is computed again before its backward, by
//                  units.h's rule
//   sharding       ZeRO's gathers, frees and reductions, and the update by unit
//   communication  begin and await, one behind the other
//   prefetch       gathers begin earlier
//   reductions     reductions are awaited later
//   messages       messages are posted earlier and awaited later
//   offload        what lies in files is fetched one use ahead, and released
//
// All but prefetch, reductions and messages say what happens, these when. They
// can be left out (messages not of a schedule that goes on from step to step),
// as split_backward can be asked for: none of the four changes a bit.
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
Program offload(const Program& program, const Units& units);
// Of data parallelism on threads: the devices around device 0.
Program devices(const Program& program, const Units& units);
Program batches(const Program& program, const Units& units);
Program split_backward(const Program& program, const Units& units);

enum class Use { kAlways, kUnlessLeftOut, kIfAskedFor };

struct Pass {
  const char* name;
  Program (*run)(const Program& program, const Units& units);
  Use use;
};
// In the order in which they run.
const std::vector<Pass>& all();

// Passes by name: those that are left out, whoever asks, and those that are
// asked for.
struct Choice {
  std::vector<std::string> without = {}, with = {};
};
// Whether a pass runs. REQUIRES: `choice` names it only where it has a choice.
bool runs(const Pass& pass, const Choice& choice);

// The passes of the choice, one after the other. From `sharding` on a program
// says all that the checker asks for, but for what lies in files, which
// `offload` says, and is checked behind each.
Program lower(Program program, const Units& units,
              Purpose purpose = Purpose::kTraining, const Choice& choice = {});

}  // namespace tessera::program::passes
