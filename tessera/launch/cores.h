// The cores that the ranks of a host share.
#pragma once

#include <cstdint>

namespace tessera::launch {

// Cores that this process may use: its affinity and its cgroup's quota.
int64_t available_cores();

// Those of each of so many ranks on this host, whole ones; 1 where there are
// more ranks. Fewer ranks than one are one.
int64_t share_of_cores(int64_t local_ranks);

// LibTorch's threads of this rank: `threads`; of 0 OMP_NUM_THREADS, else its
// share of the cores.
void take_cores(int64_t threads, int64_t local_ranks);

}  // namespace tessera::launch
