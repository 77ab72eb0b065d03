#include "tessera/program/units.h"

#include <algorithm>
#include <set>

namespace tessera::program {

std::vector<int64_t> Units::readers_of(int64_t unit) const {
  std::vector<int64_t> readers;
  for (const auto& chunk : chunks) {
    for (int64_t reader : chunk) {
      if (std::ranges::count(all[reader].reads, unit) > 0) {
        readers.push_back(reader);
      }
    }
  }
  std::ranges::sort(readers);
  return readers;
}

std::vector<int64_t> Units::owners() const {
  std::set<int64_t> owners;
  for (const auto& chunk : chunks) {
    for (int64_t unit : chunk) {
      owners.insert(all[unit].reads.begin(), all[unit].reads.end());
    }
  }
  return {owners.begin(), owners.end()};
}

// In stage 3 layers compute with what was gathered, elsewhere with what lies
// there. A piece of an update moves the optimizer's states on.
std::vector<Instruction> fetched_for(const Instruction& instruction,
                                     const Units& units) {
  std::vector<Instruction> fetches;
  const Op op = instruction.op;
  const int64_t unit = instruction.unit;
  const auto add = [&](bool lies_there, Op fetch, int64_t of) {
    if (!lies_there) return;
    fetches.push_back(
        {.op = fetch, .unit = of, .version = instruction.version});
  };
  if (unit < 0) return fetches;
  const bool updates =
      op == Op::kOptimizerStep ||
      (op == Op::kGatherUpdates && instruction.phase != Phase::kAwait);
  const bool states = units.offloads_states && units.all[unit].trained;
  const bool parameters = units.offloads_parameters;
  add(states && updates, Op::kFetchStates, unit);
  add(parameters &&
          ((updates && units.all[unit].trained) || op == Op::kGatherParameters),
      Op::kFetchParameters, unit);
  for (int64_t owner : units.all[unit].reads) {
    add(parameters && reads_parameters(op) && units.all[owner].zero_stage < 3,
        Op::kFetchParameters, owner);
  }
  return fetches;
}

}  // namespace tessera::program
