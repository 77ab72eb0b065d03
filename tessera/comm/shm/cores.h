// Whether the ranks of a group have a core each, or take turns on fewer.
#pragma once

#include <sched.h>

#include <cstdint>
#include <vector>

namespace tessera::comm::shm {

// The cores that the calling thread may run on; none if the system won't say.
cpu_set_t allowed_cores();

// `members`: what each rank of the group may run on. They have cores if each
// may run on as many as the host has ranks. That a launcher bound them to
// different ones (mpirun does so) is taken for a sign that it bound all ranks
// so, also those outside the group.
bool have_cores(const std::vector<cpu_set_t>& members, int64_t ranks_on_host);

}  // namespace tessera::comm::shm
