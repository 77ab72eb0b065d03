// What group_test cannot ask for: the ways that depend on the machine's state.
#include "tessera/comm/shm/collectives.h"

#include <gtest/gtest.h>

#include "tessera/comm/communicator.h"
#include "tests/support/ranks.h"
#include "tests/support/verbs.h"

namespace tessera::comm::shm {
namespace {

class Assume {
 public:
  explicit Assume(bool far) { Distance::assumed() = far; }
  ~Assume() { Distance::assumed() = std::nullopt; }
  Assume(const Assume&) = delete;
  Assume& operator=(const Assume&) = delete;
};

class FarCores : public ::testing::TestWithParam<int64_t> {
  const Assume assume_{/*far=*/true};
};

TEST_P(FarCores, ProcessesReduceAndMove) {
  testing::run_processes(GetParam(), "shm", testing::expect_reductions);
  testing::run_processes(GetParam(), "shm", testing::expect_moves);
}

TEST_P(FarCores, ThreadsReduceAndMove) {
  run_threads(GetParam(), "shm", testing::expect_reductions);
  run_threads(GetParam(), "shm", testing::expect_moves);
}

INSTANTIATE_TEST_SUITE_P(Ranks, FarCores, ::testing::Values(2, 3));

}  // namespace
}  // namespace tessera::comm::shm
