#include "cli/libraries.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tessera/core/kept_memory.h"

namespace tessera::cli {

void set_up_libraries(char** argv, bool computes_here) {
  constexpr const char* kDone = "TESSERA_LIBRARIES_SET_UP";
  if (std::getenv(kDone) != nullptr) return;
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) {
    ::setenv("GOMP_SPINCOUNT", "10000", /*replace=*/0);
  }
  const std::string tunables =
      c10::str("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=",
               kKeptMemory.mmap_threshold,
               ":glibc.malloc.trim_threshold=", kKeptMemory.trim_threshold,
               ":glibc.malloc.top_pad=", kKeptMemory.top_pad);
  ::setenv("GLIBC_TUNABLES", tunables.c_str(), /*replace=*/0);
  ::setenv(kDone, "1", /*replace=*/1);
  // Where it cannot, it goes on as it is.
  if (computes_here) ::execv("/proc/self/exe", argv);
}

}  // namespace tessera::cli
