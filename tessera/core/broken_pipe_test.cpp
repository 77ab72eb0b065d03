#include "tessera/core/broken_pipe.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

namespace tessera {
namespace {

TEST(BrokenPipe, IsOneWhoseReaderIsGone) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  EXPECT_FALSE(is_broken_pipe(ends[1]));
  ::close(ends[0]);
  EXPECT_TRUE(is_broken_pipe(ends[1]));
  ::close(ends[1]);
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  EXPECT_FALSE(is_broken_pipe(full));
  ::close(full);
}

}  // namespace
}  // namespace tessera
