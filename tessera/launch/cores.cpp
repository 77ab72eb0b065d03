#include "tessera/launch/cores.h"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

namespace tessera::launch {
namespace {

// The quota of this process's cgroup (version 2) in cores, or nothing.
std::optional<double> cgroup_quota() {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    if (!line.starts_with("0::")) continue;
    std::ifstream limit("/sys/fs/cgroup" + line.substr(3) + "/cpu.max");
    double quota = 0, period = 0;
    if (limit >> quota >> period && period > 0) return quota / period;
  }
  return std::nullopt;
}

}  // namespace

int64_t available_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int64_t cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0
                      ? CPU_COUNT(&allowed)
                      : sysconf(_SC_NPROCESSORS_ONLN);
  if (const auto quota = cgroup_quota()) {
    cores = std::min(cores, int64_t{std::lround(*quota)});
  }
  return std::max<int64_t>(1, cores);
}

int64_t share_of_cores(int64_t local_ranks) {
  return std::max<int64_t>(
      1, available_cores() / std::max<int64_t>(1, local_ranks));
}

void take_cores(int64_t threads, int64_t local_ranks) {
  if (threads == 0 && std::getenv("OMP_NUM_THREADS") != nullptr) return;
  at::set_num_threads(
      static_cast<int>(threads > 0 ? threads : share_of_cores(local_ranks)));
}

}  // namespace tessera::launch
