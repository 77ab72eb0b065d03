#include "cli/libraries.h"

#include <unistd.h>

#include <cstdlib>

namespace tessera::cli {

void set_up_libraries(char** argv, bool computes_here) {
  constexpr const char* kDone = "TESSERA_LIBRARIES_SET_UP";
  if (std::getenv(kDone) != nullptr) return;
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) {
    ::setenv("GOMP_SPINCOUNT", "10000", /*replace=*/0);
  }
  ::setenv("GLIBC_TUNABLES",
           "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:"
           "glibc.malloc.trim_threshold=8589934592:"
           "glibc.malloc.top_pad=67108864",
           /*replace=*/0);
  ::setenv(kDone, "1", /*replace=*/1);
  // Where it cannot, it goes on as it is.
  if (computes_here) ::execv("/proc/self/exe", argv);
}

}  // namespace tessera::cli
