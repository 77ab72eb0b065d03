#include "tessera/program/detail/classes.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera::program::detail {
namespace {

// Each distinct key becomes a class, in the order of the lowest ranks.
template <typename Key>
Classes number(const std::vector<Key>& keys) {
  Classes classes;
  std::map<Key, int64_t> known;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    const auto next = static_cast<int64_t>(known.size());
    const auto [found, is_new] = known.emplace(keys[rank], next);
    if (is_new) classes.first.push_back(static_cast<int64_t>(rank));
    classes.of_rank.push_back(found->second);
  }
  return classes;
}

}  // namespace

Classes sort_ranks(const World& world) {
  Classes classes = number(world.programs);
  const auto size = static_cast<int64_t>(world.programs.size());
  const auto lanes = static_cast<int64_t>(world.lanes.size());
  // Members do not change while classes do.
  std::vector<std::vector<std::vector<int64_t>>> members(size);
  for (int64_t rank = 0; rank < size; ++rank) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      members[rank].push_back(world.members(rank, lane));
    }
  }
  while (true) {
    using Key = std::vector<int64_t>;
    std::vector<Key> keys(size);
    for (int64_t rank = 0; rank < size; ++rank) {
      keys[rank].push_back(classes.of_rank[rank]);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        Key seen;
        for (int64_t member : members[rank][lane]) {
          seen.push_back(classes.of_rank[member]);
        }
        // Stages lie in an order; elsewhere it is enough who takes part.
        if (lane != world.pipeline) {
          std::ranges::sort(seen);
          seen.erase(std::ranges::unique(seen).begin(), seen.end());
        }
        keys[rank].push_back(-1);
        keys[rank].insert(keys[rank].end(), seen.begin(), seen.end());
      }
    }
    Classes finer = number(keys);
    if (finer.first.size() == classes.first.size()) return finer;
    classes = std::move(finer);
  }
}

}  // namespace tessera::program::detail
