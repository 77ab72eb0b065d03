#include "tessera/comm/host_map.h"

#include <algorithm>
#include <sstream>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/host.h"

namespace tessera::comm {

std::vector<std::string> hosts_of(Group& group) {
  std::string lines;
  for (const auto& host : gather_texts(group, host_identity())) {
    lines += host + "\n";
  }
  std::istringstream rest(text_of_rank_0(group, lines));
  std::vector<std::string> hosts;
  for (std::string host; std::getline(rest, host);) hosts.push_back(host);
  return hosts;
}

bool HostMap::is_even() const {
  return std::all_of(members.begin(), members.end(), [&](const auto& ranks) {
    return ranks.size() == members.front().size();
  });
}

std::vector<int64_t> HostMap::leaders() const {
  std::vector<int64_t> first;
  for (const auto& ranks : members) first.push_back(ranks.front());
  return first;
}

std::vector<int64_t> HostMap::column() const {
  std::vector<int64_t> ranks;
  for (const auto& of_host : members) ranks.push_back(of_host[local]);
  return ranks;
}

HostMap::Place HostMap::place_of(int64_t rank) const {
  for (int64_t h = 0; h < num_hosts(); ++h) {
    const auto at = std::find(members[h].begin(), members[h].end(), rank);
    if (at != members[h].end()) return {h, at - members[h].begin()};
  }
  TORCH_INTERNAL_ASSERT(false, "rank ", rank, " is on no host");
}

HostMap make_host_map(const std::vector<std::string>& host_of, int64_t rank) {
  HostMap map;
  std::vector<std::string> names;
  for (size_t r = 0; r < host_of.size(); ++r) {
    const auto at = std::find(names.begin(), names.end(), host_of[r]);
    if (at == names.end()) {
      names.push_back(host_of[r]);
      map.members.emplace_back();
    }
    map.members[std::find(names.begin(), names.end(), host_of[r]) -
                names.begin()]
        .push_back(static_cast<int64_t>(r));
  }
  const HostMap::Place place = map.place_of(rank);
  map.host = place.host;
  map.local = place.local;
  return map;
}

}  // namespace tessera::comm
