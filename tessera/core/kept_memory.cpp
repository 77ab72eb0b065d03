#include "tessera/core/kept_memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace tessera {

void keep_freed_memory() {
#ifdef __GLIBC__
  if (std::getenv("GLIBC_TUNABLES") != nullptr) return;
  const auto set = [](int parameter, int64_t bytes) {
    constexpr int64_t kMost = std::numeric_limits<int>::max();
    return mallopt(parameter, static_cast<int>(std::min(bytes, kMost))) != 0;
  };
  // Older versions take 32 MiB at most.
  if (!set(M_MMAP_THRESHOLD, kKeptMemory.mmap_threshold)) {
    set(M_MMAP_THRESHOLD, int64_t{32} << 20);
  }
  set(M_TRIM_THRESHOLD, kKeptMemory.trim_threshold);
  set(M_TOP_PAD, kKeptMemory.top_pad);
#endif
}

}  // namespace tessera
