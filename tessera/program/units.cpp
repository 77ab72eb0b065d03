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

}  // namespace tessera::program
