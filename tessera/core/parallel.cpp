#include "tessera/core/parallel.h"

#include <ATen/Parallel.h>

#if AT_PARALLEL_OPENMP && !defined(INTRA_OP_PARALLEL) && \
    !defined(__clang_analyzer__)
#error "without OpenMP at::parallel_for takes one thread: see CMakeLists.txt"
#endif

namespace tessera {

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t begin, int64_t end)> work) {
  at::parallel_for(begin, end, grain, work);
}

}  // namespace tessera
