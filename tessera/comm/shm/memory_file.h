// A memory file that is its user's alone and cannot be resized: how ranks share
// memory without a name in the file system, so that nothing is ever left behind
// (not even after kill -9), and a small /dev/shm does not matter.
//
// A peer opens it through /proc/<pid>/fd/<n> of the process that made it.
// Errors: TS_CHECK where the host has no memory for it, TS_CHECK_REACH where a
//         peer's cannot be opened or is another one.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "tessera/comm/shm/mapping.h"
#include "tessera/core/fd.h"

namespace tessera::comm::shm {

// Mode 0600, sealed against resizing. `use` is said when it fails: "make the
// group 'dp' of 8 ranks".
Fd make_memory_file(const std::string& name, size_t bytes,
                    const std::string& use);

// Maps file `fd` of process `pid`. `owner` names it in errors: "rank 3".
// Checks that it has `bytes` bytes.
void map_file_of(pid_t pid, int fd, size_t bytes, const std::string& owner,
                 Mapping& mapping);

uint64_t random_nonce();

}  // namespace tessera::comm::shm
