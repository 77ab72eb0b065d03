// What is waited for when a rank dies or is stopped ends, at the worst moment
// too.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tessera/comm/base/next_rank_watch.h"
#include "tessera/comm/base/report.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/failure_of.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::failure_of;
using ::testing::HasSubstr;
using ::testing::Not;

void wait_until_stopped(int64_t process) {
  Whereabouts where = whereabouts_of(whereabouts_here());
  where.pid = process;
  while (!is_stopped(where)) usleep(1000);
}

// Gloo never ends a message that it had begun when its peer's line closed.
TEST(LostRank, InAMessageThatIsHalfMoved) {
  for (const bool receives : {false, true}) {
    const auto ends = testing::fork_ranks(2, "gloo", [&](Communicator& c) {
      at::Tensor large = at::empty({64 << 20}, at::kByte);
      Work moved;
      const bool is_killed = c.rank() == 1;
      const bool is_receiver = is_killed != receives;
      if (is_receiver) moved = c.world().recv(large, 1 - c.rank());
      at::Tensor killed = at::full({1}, int64_t{getpid()});
      c.world().broadcast(killed, 1).wait();
      if (!is_killed && !is_receiver) {
        wait_until_stopped(killed.item<int64_t>());
      }
      if (!is_receiver) moved = c.world().send(large, 1 - c.rank());
      if (is_killed) raise(SIGSTOP);
      wait_until_stopped(killed.item<int64_t>());
      usleep(200'000);  // the line is full by then, or empty
      kill(static_cast<pid_t>(killed.item<int64_t>()), SIGKILL);
      moved.wait();
    });
    EXPECT_EQ(ends[1].signal, SIGKILL);
    EXPECT_EQ(ends[0].exit_code, 1);
    EXPECT_THAT(ends[0].message,
                AllOf(HasSubstr(receives ? "recv #1 from" : "send #1 to"),
                      HasSubstr("rank 1 tag 0"), HasSubstr("closed by peer"),
                      Not(HasSubstr("imed out"))));
  }
}

// Nor a collective: who waits for it is told once the rank counts as lost.
TEST(LostRank, InACollectiveThatIsHalfMoved) {
  for (const bool dies : {false, true}) {
    const CommunicatorOptions options{.backend = "gloo",
                                      .world_size = 2,
                                      .local_world_size = 2,
                                      .silence = std::chrono::seconds(2)};
    const auto ends = testing::fork_ranks(options, [&](Communicator& c) {
      at::Tensor large = at::empty({64 << 20}, at::kByte);
      at::Tensor lost = at::full({1}, int64_t{getpid()});
      c.world().broadcast(lost, 1).wait();
      if (c.rank() == 1) {
        const Work moved = c.world().broadcast(large, 0);
        usleep(100'000);  // it is awaited by then
        raise(SIGSTOP);
      }
      wait_until_stopped(lost.item<int64_t>());
      Work moved = c.world().broadcast(large, 0);
      usleep(100'000);
      const auto process = static_cast<pid_t>(lost.item<int64_t>());
      if (dies) kill(process, SIGKILL);
      const std::string said = failure_of([&] { moved.wait(); });
      kill(process, SIGKILL);
      EXPECT_THAT(said, AllOf(HasSubstr("broadcast #2 from rank 0"),
                              Not(HasSubstr("imed out"))));
      if (dies) {  // or its line closed before any of it was moved
        EXPECT_THAT(said, AnyOf(HasSubstr("has been dead for 2 s"),
                                HasSubstr("closed by peer")));
      } else {
        EXPECT_THAT(said, HasSubstr("has been stopped for 2 s"));
      }
    });
    EXPECT_EQ(ends[0].exit_code, 0) << ends[0].message;
  }
}

// Its lines close in the middle, and it is gone.
TEST(LostRank, ThatEndedWithAnErrorOfItsOwn) {
  const CommunicatorOptions options{.backend = "gloo",
                                    .world_size = 2,
                                    .local_world_size = 2,
                                    .silence = std::chrono::seconds(2)};
  const auto ends = testing::fork_ranks(options, [](Communicator& c) {
    at::Tensor large = at::empty({256 << 20}, at::kByte);
    c.world().barrier();
    Work moved = c.world().broadcast(large, 1);
    TS_CHECK_CONFIG(c.rank() == 0, "boom");
    moved.wait();
  });
  EXPECT_EQ(ends[1].message, "[rank 1/2] boom");
  EXPECT_THAT(ends[0].message,
              AnyOf(HasSubstr("has been gone, having failed, for 2 s"),
                    HasSubstr("closed by peer")));  // before any of it came
}

// A rank that has done its part waits, as it closes, for what it has sent.
TEST(LostRank, IsNotWaitedForAtTheEnd) {
  for (const char* backend : {"shm", "gloo"}) {
    const CommunicatorOptions options{.backend = backend,
                                      .world_size = 2,
                                      .local_world_size = 2,
                                      .timeout = std::chrono::minutes(10),
                                      .silence = std::chrono::seconds(2)};
    const TemporaryFolder folder;
    const auto ends = testing::fork_ranks(options, [&](Communicator& c) {
      CommunicatorOptions own = options;
      own.rank = c.rank();
      own.store = c10::make_intrusive<c10d::FileStore>(folder.file("store"), 2);
      auto closed = make_communicator(own);
      at::Tensor process = at::full({1}, int64_t{getpid()});
      c.world().broadcast(process, 1).wait();
      if (c.rank() == 1) {
        raise(SIGSTOP);
        _exit(0);
      }
      wait_until_stopped(process.item<int64_t>());
      const auto stopped = static_cast<pid_t>(process.item<int64_t>());
      const pid_t guard = fork();  // against a test without an end
      if (guard == 0) {
        sleep(60);
        kill(stopped, SIGKILL);
        _exit(0);
      }
      closed->world().send(at::empty({64 << 20}, at::kByte), 1);
      closed.reset();
      EXPECT_EQ(waitpid(guard, nullptr, WNOHANG), 0) << "it was waited for";
      kill(guard, SIGKILL);
      waitpid(guard, nullptr, 0);
      kill(stopped, SIGKILL);
    });
    EXPECT_EQ(ends[0].exit_code, 0) << ends[0].message;
    EXPECT_EQ(ends[1].signal, SIGKILL);
  }
}

}  // namespace
}  // namespace tessera::comm
