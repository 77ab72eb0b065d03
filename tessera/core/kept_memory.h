// Memory of large tensors, which the C library gives back to the system when
// they are freed, and gets again as pages of zeros: of a step of some 30 M
// parameters 120,000 of them, a tenth of its time.
#pragma once

#include <cstdint>

namespace tessera {

// What the C library then does, in bytes.
struct KeptMemory {
  int64_t mmap_threshold;  // larger blocks are the system's
  int64_t trim_threshold;  // more at the end of the heap goes back
  int64_t top_pad;         // by which more is taken than is asked for
};
inline constexpr KeptMemory kKeptMemory = {int64_t{8} << 30, int64_t{8} << 30,
                                           int64_t{64} << 20};

// From now on this process keeps what is freed, for what is allocated next:
// call it first in main(). `tessera train`, eval, generate, bench and launch
// have it so for themselves and the ranks that they start, on huge pages where
// the host gives them.
// Leaves a GLIBC_TUNABLES of the user's alone, and other C libraries than
// glibc. Blocks from 2 GiB on stay the system's.
void keep_freed_memory();

}  // namespace tessera
