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

#include "tessera/core/cgroup.h"

namespace tessera::launch {
namespace {

// Microseconds of a period, and those of it that may be used; -1 and the like
// stand for all.
std::optional<double> cores_by(double quota, double period) {
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The least quota of this process's control groups in cores, or nothing.
std::optional<double> cgroup_quota() {
  const std::string of_version_1 = "cpu.cfs_quota_us";
  std::optional<double> least;
  for (const std::string& file : cgroup_files("cpu", "cpu.max", of_version_1)) {
    std::ifstream limit(file);
    double quota = 0, period = 0;
    limit >> quota;  // "max" is no number
    if (file.ends_with(of_version_1)) {
      const size_t folder = file.size() - of_version_1.size();
      std::ifstream(file.substr(0, folder) + "cpu.cfs_period_us") >> period;
    } else {
      limit >> period;
    }
    const auto cores = cores_by(quota, period);
    if (cores && (!least || *cores < *least)) least = cores;
  }
  return least;
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
