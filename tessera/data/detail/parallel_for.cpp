#include "tessera/data/detail/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::data::detail {

void parallel_for(
    size_t count, int64_t threads,
    const std::function<std::function<void(size_t)>()>& make_work) {
  if (threads <= 0) threads = std::thread::hardware_concurrency();
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    try {
      const auto work = make_work();
      for (size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < std::min<size_t>(threads, count); ++i) {
      others.emplace_back(run);
    }
    run();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera::data::detail
