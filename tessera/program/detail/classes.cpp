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

// The groups of one lane, each once, and which of them a rank is in.
struct Groups {
  std::vector<std::vector<int64_t>> members;
  std::vector<int64_t> of_rank;
};

Groups groups_of(const World& world, int64_t lane) {
  Groups groups;
  groups.of_rank.assign(world.programs.size(), -1);
  for (size_t rank = 0; rank < world.programs.size(); ++rank) {
    if (groups.of_rank[rank] >= 0) continue;
    const auto group = static_cast<int64_t>(groups.members.size());
    groups.members.push_back(world.members(static_cast<int64_t>(rank), lane));
    for (int64_t member : groups.members.back()) groups.of_rank[member] = group;
  }
  return groups;
}

using Key = std::vector<int64_t>;

// The classes of each group's members. Stages lie in an order; elsewhere it is
// enough who takes part, and how many do: a collective's time goes by that.
std::vector<Key> classes_in(const Groups& groups, const Classes& classes,
                            bool in_order) {
  std::vector<Key> all;
  for (const auto& members : groups.members) {
    Key& seen = all.emplace_back();
    for (int64_t member : members) seen.push_back(classes.of_rank[member]);
    if (in_order) continue;
    std::ranges::sort(seen);
    seen.erase(std::ranges::unique(seen).begin(), seen.end());
    seen.push_back(std::ssize(members));
  }
  return all;
}

}  // namespace

Classes sort_ranks(const World& world) {
  Classes classes = number(world.programs);
  const size_t size = world.programs.size(), lanes = world.lanes.size();
  std::vector<Groups> groups;
  for (size_t lane = 0; lane < lanes; ++lane) {
    groups.push_back(groups_of(world, static_cast<int64_t>(lane)));
  }
  while (true) {
    std::vector<Key> keys(size);
    for (size_t rank = 0; rank < size; ++rank) {
      keys[rank].push_back(classes.of_rank[rank]);
    }
    for (size_t lane = 0; lane < lanes; ++lane) {
      // Groups that look alike get one number.
      const Classes alike = number(classes_in(
          groups[lane], classes, static_cast<int64_t>(lane) == world.pipeline));
      for (size_t rank = 0; rank < size; ++rank) {
        keys[rank].push_back(alike.of_rank[groups[lane].of_rank[rank]]);
      }
    }
    Classes finer = number(keys);
    if (finer.first.size() == classes.first.size()) return finer;
    classes = std::move(finer);
  }
}

}  // namespace tessera::program::detail
