#include "tessera/comm/shm/cores.h"

#include <algorithm>

namespace tessera::comm::shm {
namespace {

bool are_bound_apart(const std::vector<cpu_set_t>& members) {
  cpu_set_t taken;
  CPU_ZERO(&taken);
  for (const cpu_set_t& cores : members) {
    cpu_set_t both;
    CPU_AND(&both, &taken, &cores);
    if (CPU_COUNT(&cores) == 0 || CPU_COUNT(&both) != 0) return false;
    CPU_OR(&taken, &taken, &cores);
  }
  return true;
}

}  // namespace

cpu_set_t allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) CPU_ZERO(&cores);
  return cores;
}

bool have_cores(const std::vector<cpu_set_t>& members, int64_t ranks_on_host) {
  const bool plenty =
      std::all_of(members.begin(), members.end(), [&](const cpu_set_t& cores) {
        return CPU_COUNT(&cores) >= ranks_on_host;
      });
  return plenty || are_bound_apart(members);
}

}  // namespace tessera::comm::shm
