#include "tessera/launch/signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "tessera/core/files.h"

namespace tessera::launch {
namespace {

// The status of a child process that ran `body` and then exit code 0.
int status_of_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

void let_pass(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() <= end) {
  }
}

TEST(StopRequest, RemembersTheFirstSignal) {
  for (int signal : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) {
    const StopRequest stop;
    EXPECT_FALSE(stop.requested());
    raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
}

TEST(StopRequest, TakesSignalsTogetherThatComeTogether) {
  const StopRequest stop;
  raise(SIGINT);
  raise(SIGTERM);
  EXPECT_EQ(stop.signal(), SIGINT);
}

TEST(StopRequest, ASecondSignalEndsAtOnce) {
  const int status = status_of_child([] {
    const StopRequest stop;
    raise(SIGTERM);
    let_pass(2 * StopRequest::kMerge);
    raise(SIGINT);
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
}

// As nohup starts it.
TEST(StopRequest, AHangUpThatIsIgnoredStaysSo) {
  const int status = status_of_child([] {
    signal(SIGHUP, SIG_IGN);
    const StopRequest stop;
    raise(SIGHUP);
    if (stop.requested()) _exit(1);
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(TidyUp, ASignalEndsTheProcessAsWithoutIt) {
  const TemporaryFolder folder;
  const std::string tidied = folder.file("tidied");
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) {
    const int status = status_of_child([&] {
      const TidyUp tidy([&] { write_file_atomic(tidied, "tidied"); });
      raise(signal);
      let_pass(std::chrono::seconds(60));
    });
    EXPECT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(WTERMSIG(status), signal);
    EXPECT_TRUE(std::filesystem::remove(tidied)) << signal;
  }
  const int status = status_of_child([&] {
    {
      const TidyUp tidy([&] { write_file_atomic(tidied, "tidied"); });
    }
    raise(SIGTERM);
  });
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_FALSE(std::filesystem::exists(tidied));
}

TEST(StopRequest, GivesTheSignalsBack) {
  const int status = status_of_child([] {
    {
      const StopRequest stop;
    }
    raise(SIGTERM);
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

}  // namespace
}  // namespace tessera::launch
