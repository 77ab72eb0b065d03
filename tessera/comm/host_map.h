// Which ranks of a group share a host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

// Of each rank its host, the same on every rank: ranks that can share memory
// say the same (host_identity()).
// Comm: two sends from every rank but the first, and two broadcasts.
std::vector<std::string> hosts_of(Group& group);

struct HostMap {
  // Ranks of the group by host; hosts in the order of their first rank.
  std::vector<std::vector<int64_t>> members;
  int64_t host = 0;   // of this rank: an index of `members`
  int64_t local = 0;  // this rank's place among its host's

  int64_t num_hosts() const { return static_cast<int64_t>(members.size()); }
  const std::vector<int64_t>& locals() const { return members[host]; }
  int64_t num_locals() const { return static_cast<int64_t>(locals().size()); }
  // Has every host as many ranks as the others?
  bool is_even() const;
  // The first rank of each host.
  std::vector<int64_t> leaders() const;
  // Of an even map: the ranks that have this one's place on each host.
  std::vector<int64_t> column() const;
  // The host of a rank, and its place there.
  struct Place {
    int64_t host = 0;
    int64_t local = 0;
  };
  Place place_of(int64_t rank) const;
};

// `host_of`: of each rank of the group.
HostMap make_host_map(const std::vector<std::string>& host_of, int64_t rank);

}  // namespace tessera::comm
