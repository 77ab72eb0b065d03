#include "tessera/program/facts.h"

#include <algorithm>
#include <set>

namespace tessera::program {

bool holds(const UnitFacts& unit, const ParameterFacts& of, bool runs_here) {
  const bool never_runs = unit.output_bytes == 0;
  return runs_here || never_runs || of.tied;
}

std::vector<ParameterFacts> held_by(const Facts& facts,
                                    const std::vector<int64_t>& units) {
  std::set<int64_t> owners;
  for (int64_t unit : units) {
    const auto& reads = facts.units.at(unit).reads;
    owners.insert(reads.begin(), reads.end());
  }
  std::vector<ParameterFacts> held;
  for (int64_t owner : owners) {
    const UnitFacts& unit = facts.units.at(owner);
    const bool runs_here = std::ranges::count(units, owner) > 0;
    for (const auto& each : unit.parameters) {
      if (holds(unit, each, runs_here)) held.push_back(each);
    }
  }
  return held;
}

}  // namespace tessera::program
