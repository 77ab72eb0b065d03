#include "tessera/comm/base/next_rank_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

// Rank 1 of two is on another host, in a container with the same number.
class NextRankWatchTest : public ::testing::Test {
 protected:
  NextRankWatchTest() {
    set(where_key(0), whereabouts_here());
    say_where(::getpid(), "elsewhere", 1);
  }
  void set(const std::string& key, const std::string& value) {
    c10d::Store& store = *store_;  // HashStore's own hides this one
    store.set(key, value);
  }
  void say_where(pid_t pid, const std::string& space, uint64_t host) {
    set(where_key(1), c10::str(pid, " ", space, " ", host, " far"));
  }
  std::string look() { return watch_.look(&*store_); }

  c10::intrusive_ptr<c10d::HashStore> store_ =
      c10::make_intrusive<c10d::HashStore>();
  NextRankWatch watch_{0, 2, 3};
};

TEST_F(NextRankWatchTest, ThreeLooksWithoutASignOfLife) {
  for (int i = 0; i < 9; ++i) EXPECT_EQ(look(), "");  // it does not beat
  for (const char* beat : {"1", "2", "3"}) {
    set("beat-1", beat);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(look(), "");
  }
  EXPECT_THAT(look(), HasSubstr("on far) has given no sign of life for 3 s"));
  set("beat-1", "4");
  EXPECT_EQ(look(), "");
  EXPECT_EQ(watch_.look(nullptr), "");
}

TEST_F(NextRankWatchTest, OneThatIsStoppedBeforeItsFirstSignOfLife) {
  NextRankWatch(1, 2, 3).begin(*store_);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(look(), "");
  EXPECT_THAT(look(), HasSubstr("on far) has given no sign of life for 3 s"));
}

TEST_F(NextRankWatchTest, NobodyMissesOneThatEndsBeforeItHasGivenAny) {
  NextRankWatch other(1, 2, 3);
  other.begin(*store_);
  other.leave(*store_, /*failed=*/false);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(look(), "");
}

TEST_F(NextRankWatchTest, NobodyMissesOneThatHasLeft) {
  NextRankWatch other(1, 2, 3);
  set(where_key(0), c10::str(::getpid(), " elsewhere 1 near"));
  other.beat(*store_);
  EXPECT_EQ(store_->get_to_str("beat-1"), "1");
  other.beat(*store_);
  EXPECT_EQ(store_->get_to_str("beat-1"), "2");
  other.leave(*store_, /*failed=*/false);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(look(), "");
}

TEST_F(NextRankWatchTest, AProcessOfThisHostThatIsStopped) {
  set(where_key(1), whereabouts_here());
  NextRankWatch threads(0, 2, 3);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(threads.look(&*store_), "");
  const pid_t child = fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  std::string where = whereabouts_here();
  where.replace(0, where.find(' '), std::to_string(child));
  set(where_key(1), where);
  EXPECT_EQ(look(), "");
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(look(), "");
  // The store may have gone meanwhile.
  EXPECT_THAT(watch_.look(nullptr), HasSubstr("has been stopped for 3 s"));
  ::kill(child, SIGCONT);
  ::waitpid(child, nullptr, WCONTINUED);
  EXPECT_EQ(look(), "");
  // One that has died is missed once it is gone from the host's processes, or
  // waits there for its parent, unless it said that it would leave.
  ::kill(child, SIGKILL);
  siginfo_t ended{};
  ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(look(), "");
  EXPECT_THAT(look(), HasSubstr("has been dead for 3 s"));
  ::waitpid(child, nullptr, 0);
  EXPECT_THAT(look(), HasSubstr("has been dead for 4 s"));
  EXPECT_EQ(watch_.look(nullptr), "");  // it may have left well
  set("beat-1", "left");
  EXPECT_EQ(look(), "");
}

TEST_F(NextRankWatchTest, OneThatFailedAndEnded) {
  NextRankWatch other(1, 2, 3);
  other.begin(*store_);
  other.leave(*store_, /*failed=*/true);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(look(), "");
  EXPECT_THAT(look(), HasSubstr("has been gone, having failed, for 3 s"));
}

}  // namespace
}  // namespace tessera::comm
