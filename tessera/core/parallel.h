// Work shared out among a rank's threads: at::parallel_for, which is a loop of
// one thread wherever it is compiled without OpenMP. Here it is compiled once,
// with it, and the threads are those of LibTorch's own operators.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera {

// Ranges of at least `grain` of [begin, end), each once. What work throws is
// thrown here.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t begin, int64_t end)> work);

}  // namespace tessera
