#include "tessera/launch/cores.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace tessera::launch {
namespace {

TEST(Cores, AreSharedOutWholeAndEachRankHasOne) {
  const int64_t all = available_cores();
  EXPECT_GE(all, 1);
  EXPECT_EQ(share_of_cores(1), all);
  EXPECT_EQ(share_of_cores(0), all);
  EXPECT_EQ(share_of_cores(all), 1);
  EXPECT_EQ(share_of_cores(all + 1), 1);
}

TEST(Cores, ThreadsAreThoseAskedForThenThoseOfTheEnvironment) {
  const char* given = std::getenv("OMP_NUM_THREADS");
  const std::string before = given == nullptr ? "" : given;
  const int threads = at::get_num_threads();

  ::setenv("OMP_NUM_THREADS", "7", /*overwrite=*/1);
  take_cores(/*threads=*/0, /*local_ranks=*/1);  // LibTorch has read it
  EXPECT_EQ(at::get_num_threads(), threads);
  take_cores(/*threads=*/3, /*local_ranks=*/1);
  EXPECT_EQ(at::get_num_threads(), 3);
  ::unsetenv("OMP_NUM_THREADS");
  take_cores(/*threads=*/0, /*local_ranks=*/2);
  EXPECT_EQ(at::get_num_threads(), share_of_cores(2));

  if (given != nullptr) ::setenv("OMP_NUM_THREADS", before.c_str(), 1);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace tessera::launch
