#include "tessera/comm/shm/segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

using ::testing::HasSubstr;

Place place_of(int64_t rank) {
  return {.group = "test",
          .rank = rank,
          .ranks = {0, 1},
          .timeout = std::chrono::seconds(20)};
}

TEST(Segment, IsItsUsersAlone) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::jthread first([&] { Segment(Rendezvous(store, "g"), place_of(0)); });
  std::istringstream text(
      Rendezvous(store, "g")
          .get("segment", std::chrono::seconds(20), "the segment"));
  int pid = 0, fd = -1;
  text >> pid >> fd;
  const std::string path = c10::str("/proc/", pid, "/fd/", fd);
  struct stat info{};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  Segment(Rendezvous(store, "g"), place_of(1));
}

TEST(Segment, RefusesAnotherFile) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Rendezvous rendezvous(store, "g");
  const auto attach = [&](const std::string& segment) -> std::string {
    rendezvous.set("segment", segment);
    try {
      Segment(rendezvous, place_of(1));
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kUnreachable);
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_THAT(attach(c10::str(getpid(), " 99999 1")), HasSubstr("cannot open"));
  const Fd null(open("/dev/null", O_RDWR));
  EXPECT_THAT(attach(c10::str(getpid(), " ", null.get(), " 1")),
              HasSubstr("holds 0 bytes"));
}

TEST(Call, SurvivesPacking) {
  const Call call{.sequence = 7,
                  .verb = Verb::kBroadcast,
                  .op = ReduceOp::kMax,
                  .dtype = at::kBFloat16,
                  .root = 3,
                  .numel = int64_t{1} << 40};
  PackedCall packed{};
  packed.store(call);
  EXPECT_EQ(packed.load(), call);
  packed.store(Call{});
  EXPECT_EQ(packed.load(), Call{});
}

}  // namespace
}  // namespace tessera::comm::shm
