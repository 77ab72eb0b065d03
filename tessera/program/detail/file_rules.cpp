#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

void FileRules::take(const Instruction& instruction) {
  for (const Instruction& fetch : fetched_for(instruction, units_)) {
    const Progress state = fetched_[{fetch.op, fetch.unit}];
    if (state == Progress::kDone) continue;  // without words for each
    require(false, "needs ", describe(fetch),
            state == Progress::kNone ? ", which was not begun"
                                     : ", which is not awaited yet");
  }
  if (is_fetch(instruction.op)) {
    advance(instruction, fetched_[{instruction.op, instruction.unit}],
            "fetched already");
  }
  if (instruction.op == Op::kGatherParameters) {
    gathers_[instruction.unit] = !ends(instruction);
  }
  if (is_release(instruction.op)) {
    Progress& state = fetched_[{fetch_of(instruction.op), instruction.unit}];
    require(
        instruction.op != Op::kReleaseParameters || !gathers_[instruction.unit],
        "released while a gather reads or writes it");
    require(state == Progress::kDone, "released before it was fetched");
    state = Progress::kNone;
  }
}

void FileRules::finish() {
  for (const auto& [which, state] : fetched_) {
    require(state == Progress::kNone, name_of(which.first), " unit ",
            which.second, " has no release");
  }
}

}  // namespace tessera::program::detail
