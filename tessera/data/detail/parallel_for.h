// Work on many parts by a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera::data::detail {

// Calls work(i) once for each i < count. `make_work` makes each thread's own
// (what it holds is not shared). The first exception is rethrown when all
// threads have ended. threads 0: as many as there are cores.
void parallel_for(
    size_t count, int64_t threads,
    const std::function<std::function<void(size_t)>()>& make_work);

}  // namespace tessera::data::detail
