#include "tessera/core/cgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

TEST(Cgroup, FilesLeadUpToTheRoot) {
  const auto files = cgroup_files("memory", "memory.max", "memory.limit");
  for (const auto& file : files) {
    EXPECT_THAT(file, StartsWith("/sys/fs/cgroup"));
    EXPECT_THAT(
        file, EndsWith(file.find("memory.max") != file.npos ? "/memory.max"
                                                            : "/memory.limit"));
    EXPECT_EQ(file.find("//"), file.npos) << file;
  }
  if (files.empty()) return;  // no control groups here
  const auto roots = std::ranges::count_if(files, [](const auto& file) {
    return file == "/sys/fs/cgroup/memory.max" ||
           file == "/sys/fs/cgroup/memory/memory.limit";
  });
  EXPECT_GE(roots, 1);
}

}  // namespace
}  // namespace tessera
