#include "tessera/core/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

namespace tessera {
namespace {

TEST(ParallelFor, TakesTheThreadsThatARankHas) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int64_t> sum = 0;
  parallel_for(0, 300, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  at::set_num_threads(before);
  EXPECT_EQ(sum, 299 * 300 / 2);
  EXPECT_EQ(threads.size(), 3);
}

TEST(ParallelFor, HandsOnWhatIsThrown) {
  const auto work = [](int64_t begin, int64_t) {
    if (begin == 0) throw std::runtime_error("no");
  };
  EXPECT_THROW(parallel_for(0, 300, 1, work), std::runtime_error);
}

}  // namespace
}  // namespace tessera
