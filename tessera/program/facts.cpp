#include "tessera/program/facts.h"

#include <algorithm>
#include <set>

namespace tessera::program {

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
    const bool never_runs = unit.output_bytes == 0;
    const bool whole = never_runs || std::ranges::count(units, owner) > 0;
    for (const auto& each : unit.parameters) {
      if (whole || each.tied) held.push_back(each);
    }
  }
  return held;
}

}  // namespace tessera::program
