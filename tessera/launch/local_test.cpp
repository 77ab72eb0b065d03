#include "tessera/launch/local.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/detail/rank_process.h"
#include "tessera/launch/detail/verdict.h"
#include "tessera/launch/environment.h"

namespace tessera::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Local : public ::testing::Test {
 protected:
  // Ranks that run `script` in the test's folder.
  LocalOptions shell(int64_t nproc, const std::string& script) const {
    LocalOptions options;
    options.nproc = nproc;
    options.argv = {"sh", "-c", "cd '" + folder_ + "'\n" + script};
    return options;
  }

  std::string content(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  pid_t pid_in(const std::string& name) const {
    return std::stoi(content(name));
  }

  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path().string();
};

// A launcher in a process of its own, whose stderr the test reads.
class Launcher {
 public:
  explicit Launcher(const LocalOptions& options, bool with_a_thread = false) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDERR_FILENO);
      if (with_a_thread) std::thread([] { pause(); }).detach();
      int code = 1;
      try {
        code = run_local(options);
      } catch (const Error& error) {
        code = static_cast<int>(error.exit_code());
      }
      _exit(code);
    }
    close(ends[1]);
    stderr_ = ends[0];
  }
  ~Launcher() { close(stderr_); }

  pid_t pid() const { return pid_; }

  // Reads on until `text` has been shown `times`.
  void wait_for(const std::string& text, int times) {
    while (count(text) < times && read_more()) {
    }
    EXPECT_GE(count(text), times) << shown_;
  }
  // The exit code, or minus the signal.
  int finish() {
    while (read_more()) {
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
  const std::string& shown() const { return shown_; }
  std::string last_line() const {
    const size_t end = shown_.find_last_not_of('\n');
    const size_t start = shown_.rfind('\n', end);
    return shown_.substr(start + 1, end - start);
  }

 private:
  int count(const std::string& text) const {
    int n = 0;
    for (size_t at = 0; (at = shown_.find(text, at)) != std::string::npos;
         at += text.size()) {
      ++n;
    }
    return n;
  }
  bool read_more() {
    char bytes[4096];
    const ssize_t n = read(stderr_, bytes, sizeof bytes);
    if (n > 0) shown_.append(bytes, n);
    return n > 0;
  }

  pid_t pid_ = -1;
  int stderr_ = -1;
  std::string shown_;
};

// Waits for the end of a process that is no child of the test's.
bool has_ended(const Fd& process) {
  pollfd ended{process.get(), POLLIN, 0};
  return poll(&ended, 1, 30'000) == 1;
}

bool is_gone(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

TEST_F(Local, TellsEachRankItsPlaceAndSharesTheCoresOut) {
  auto options =
      shell(3,
            "echo $TESSERA_RANK $TESSERA_WORLD_SIZE $TESSERA_LOCAL_RANK "
            "$TESSERA_LOCAL_WORLD_SIZE $TESSERA_NODE $WORD $OMP_NUM_THREADS "
            "> place$TESSERA_RANK; test -w $TESSERA_STORE");
  options.environment["WORD"] = "hello";
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_EQ(launcher.shown(), "");
  const char* given = std::getenv("OMP_NUM_THREADS");
  const std::string threads =
      given != nullptr ? given : std::to_string(share_of_cores(3));
  EXPECT_EQ(content("place0"), "0 3 0 3 0 hello " + threads + "\n");
  EXPECT_EQ(content("place2"), "2 3 2 3 0 hello " + threads + "\n");
}

TEST_F(Local, AProgramThatKnowsTorchrunFindsItsPlace) {
  ::unsetenv("MASTER_ADDR");
  ::unsetenv("MASTER_PORT");
  LocalOptions options =
      shell(2,
            "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
            "$MASTER_ADDR $MASTER_PORT > place$RANK");
  EXPECT_EQ(Launcher(options).finish(), 0);
  EXPECT_THAT(content("place1"),
              ::testing::MatchesRegex("1 2 1 2 0 127.0.0.1 [1-9][0-9]+\n"));
  EXPECT_EQ(content("place0").substr(1),
            " 2 0 2" + content("place1").substr(7));
  options.environment = {{"MASTER_ADDR", "a-host"}, {"MASTER_PORT", "77"}};
  EXPECT_EQ(Launcher(options).finish(), 0);
  EXPECT_EQ(content("place1"), "1 2 1 2 0 a-host 77\n");
  options.environment = {{"MASTER_PORT", "77"}};
  EXPECT_EQ(Launcher(options).finish(), 0);
  EXPECT_EQ(content("place1"), "1 2 1 2 0 127.0.0.1 77\n");
  options.environment = {{"MASTER_ADDR", "a-host"}};
  EXPECT_EQ(Launcher(options).finish(), 0);
  EXPECT_THAT(content("place1"),
              ::testing::MatchesRegex("1 2 1 2 0 a-host [1-9][0-9]+\n"));
}

TEST_F(Local, ACopyHasWhatAProgramWouldHave) {
  const Fd of_launcher(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Fd of_ranks(open("/dev/null", O_RDONLY));
  LocalOptions options = shell(3, "exit 9");
  options.environment["WORD"] = "hello";
  options.as_copy = [&] {
    const auto variables = process_variables();
    struct sigaction action{};
    sigaction(SIGTERM, nullptr, &action);
    std::stringstream found;
    found << variables.at("TESSERA_WORLD_SIZE") << variables.at("WORD") << " "
          << (fcntl(of_launcher.get(), F_GETFD) < 0)
          << (fcntl(of_ranks.get(), F_GETFD) == 0)
          << (access(variables.at("TESSERA_STORE").c_str(), W_OK) == 0)
          << (action.sa_handler == SIG_DFL) << (getpgrp() == getpid());
    std::ofstream(folder_ + "/place" + variables.at("TESSERA_RANK"))
        << found.str();
    std::cerr << "said\n";
    return 0;
  };
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_THAT(launcher.shown(), HasSubstr("[rank 1] said\n"));
  EXPECT_EQ(content("place0"), "3hello 11111");
  EXPECT_EQ(content("place2"), "3hello 11111");
}

TEST_F(Local, IsNotCopiedWhereItHasThreads) {
  LocalOptions options = shell(2, "exit 9");
  options.as_copy = [] { return 8; };
  EXPECT_EQ(Launcher(options).finish(), 8);
  EXPECT_EQ(Launcher(options, /*with_a_thread=*/true).finish(), 9);
}

TEST_F(Local, WhatACopyThrowsEndsItAlone) {
  LocalOptions options = shell(2, "exit 9");
  options.as_copy = []() -> int {
    TS_CHECK(false, "at once");
    return 0;
  };
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 128 + SIGABRT);
  EXPECT_THAT(launcher.shown(), HasSubstr("at once"));
}

TEST_F(Local, ReturnsTheFirstFailureAndShowsItLast) {
  Launcher launcher(shell(3,
                          "if [ $TESSERA_RANK = 1 ]; then\n"
                          "  for i in $(seq 30); do echo line $i >&2; done\n"
                          "  printf 'the cause' >&2; exit 7\n"
                          "fi\n"
                          "exec sleep 1000"));
  EXPECT_EQ(launcher.finish(), 7);
  EXPECT_THAT(launcher.last_line(), HasSubstr("rank 1 of 3 on "));
  EXPECT_THAT(launcher.last_line(), HasSubstr("failed first: exit code 7."));
  EXPECT_THAT(launcher.shown(), HasSubstr("[rank 1] line 1\n"));
  const size_t summary = launcher.shown().find("last lines of rank 1:");
  ASSERT_NE(summary, std::string::npos);
  const std::string kept = launcher.shown().substr(summary);
  EXPECT_THAT(kept, HasSubstr("  | line 30\n  | the cause\n"));
  EXPECT_THAT(kept, Not(HasSubstr("| line 11\n")));
}

TEST_F(Local, NamesTheSignalThatKilledARank) {
  for (const auto& [name, code] :
       std::map<std::string, int>{{"SEGV", 139}, {"KILL", 137}}) {
    Launcher launcher(shell(
        2, "[ $TESSERA_RANK = 0 ] && kill -" + name + " $$\nexec sleep 1000"));
    EXPECT_EQ(launcher.finish(), code);
    EXPECT_THAT(launcher.last_line(),
                HasSubstr("killed by SIG" + name + " (exit code " +
                          std::to_string(code) + ")"));
  }
}

TEST_F(Local, KillsWhoDoesNotEndWithinTheGrace) {
  auto options = shell(2,
                       "echo $$ > pid$TESSERA_RANK\n"
                       "if [ $TESSERA_RANK = 0 ]; then\n"
                       "  trap '' TERM; echo ready > ready; exec sleep 1000\n"
                       "fi\n"
                       "while ! [ -s ready ]; do :; done; exit 3");
  options.grace = std::chrono::milliseconds(100);
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 3);
  EXPECT_TRUE(is_gone(pid_in("pid0")));
  EXPECT_TRUE(is_gone(pid_in("pid1")));
}

TEST_F(Local, AStoppedRankEndsWithTheOthers) {
  auto options = shell(2,
                       "echo $$ > pid$TESSERA_RANK\n"
                       "[ $TESSERA_RANK = 0 ] && kill -STOP $$\n"
                       "while ! grep -q '^State:.T' /proc/$(cat pid0)/status; "
                       "do :; done; exit 3");
  options.grace = std::chrono::minutes(5);  // a SIGTERM must be enough
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 3);
  EXPECT_TRUE(is_gone(pid_in("pid0")));
}

TEST_F(Local, TakesAwayWhatARankStarted) {
  Launcher launcher(shell(1, "sleep 1000 & echo $! > child; exit 3"));
  EXPECT_EQ(launcher.finish(), 3);
  const Fd child = detail::open_pidfd(pid_in("child"));
  EXPECT_TRUE(!child.open() || has_ended(child));
}

TEST_F(Local, ALostPeerIsNotTheFirstCause) {
  auto options = shell(2,
                       "echo $$ > pid$TESSERA_RANK\n"
                       "if [ $TESSERA_RANK = 0 ]; then exit 69; fi\n"
                       "while ! [ -s pid0 ]; do :; done\n"
                       "while kill -0 $(cat pid0) 2>/dev/null; do :; done\n"
                       "exit 5");
  options.settle = std::chrono::minutes(5);
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 5);
  EXPECT_THAT(launcher.last_line(), HasSubstr("rank 1 of 2"));
}

TEST_F(Local, ALostPeerEndsTheRunAllTheSame) {
  Launcher launcher(
      shell(2, "[ $TESSERA_RANK = 0 ] && exit 69; exec sleep 1000"));
  EXPECT_EQ(launcher.finish(), 69);
  EXPECT_THAT(launcher.last_line(), HasSubstr("rank 0 of 2"));
}

constexpr const char* kStopsWell =
    "trap 'echo saved >&2; exit 75' TERM INT USR1\n"
    "sleep 1000 & echo ready >&2; wait";

TEST_F(Local, PassesASignalOnAndReturns75) {
  for (int signal : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) {
    Launcher launcher(shell(2, kStopsWell));
    launcher.wait_for("ready", 2);
    kill(launcher.pid(), signal);
    EXPECT_EQ(launcher.finish(), 75);
    EXPECT_THAT(launcher.shown(), HasSubstr("[rank 1] saved"));
    EXPECT_THAT(launcher.shown(), Not(HasSubstr("failed")));
  }
}

TEST_F(Local, ThreadsOfALibraryDoNotTakeTheSignalAway) {
  const LocalOptions options = shell(2, kStopsWell);
  Launcher launcher(options, /*with_a_thread=*/true);
  launcher.wait_for("ready", 2);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.finish(), 75);
}

TEST_F(Local, RanksThatStopOfThemselvesMakeIt75) {
  Launcher launcher(shell(2, "[ $TESSERA_RANK = 0 ] && exit 75; exit 0"));
  EXPECT_EQ(launcher.finish(), 75);
}

TEST_F(Local, ASecondSignalEndsAllAtOnce) {
  Launcher launcher(shell(2,
                          "echo $$ > pid$TESSERA_RANK\n"
                          "trap 'echo noted >&2' TERM\n"
                          "echo ready >&2\n"
                          "while :; do sleep 1000 & wait; done"));
  launcher.wait_for("ready", 2);
  kill(launcher.pid(), SIGTERM);
  launcher.wait_for("noted", 2);
  kill(launcher.pid(), SIGINT);
  EXPECT_EQ(launcher.finish(), 128 + SIGINT);
  EXPECT_THAT(launcher.last_line(), HasSubstr("second signal, SIGINT"));
  EXPECT_TRUE(is_gone(pid_in("pid0")));
  EXPECT_TRUE(is_gone(pid_in("pid1")));
}

TEST_F(Local, TheSameSignalTwiceAtOnceIsOneRequest) {
  for (int signal : {SIGTERM, SIGHUP}) {
    Launcher launcher(shell(2,
                            "trap 'echo noted >&2; exit 75' TERM\n"
                            "echo ready >&2\n"
                            "while :; do sleep 1000 & wait; done"));
    launcher.wait_for("ready", 2);
    // Two signals that differ are never delivered as one.
    kill(launcher.pid(), SIGTERM);
    kill(launcher.pid(), signal);
    EXPECT_EQ(launcher.finish(), 75);
  }
}

TEST_F(Local, AProgramThatDoesNotHandleTheSignalIsNamedSo) {
  Launcher launcher(shell(2, "echo ready >&2; exec sleep 1000"));
  launcher.wait_for("ready", 2);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.finish(), 128 + SIGTERM);
  EXPECT_THAT(launcher.last_line(), HasSubstr("passed this signal on"));
}

TEST_F(Local, RanksDieWithALauncherThatIsKilled) {
  Launcher launcher(
      shell(2, "echo $$ > pid$TESSERA_RANK; echo ready >&2; exec sleep 1000"));
  launcher.wait_for("ready", 2);
  std::vector<Fd> ranks;
  for (const char* name : {"pid0", "pid1"}) {
    ranks.push_back(detail::open_pidfd(pid_in(name)));
    ASSERT_TRUE(ranks.back().open());
  }
  kill(launcher.pid(), SIGKILL);
  EXPECT_EQ(launcher.finish(), -SIGKILL);
  for (const auto& rank : ranks) EXPECT_TRUE(has_ended(rank));
}

TEST_F(Local, MarksLinesWithTheirRankWhereNeeded) {
  Launcher launcher(shell(
      2,
      "if [ $TESSERA_RANK = 0 ]; then printf '10%%\\r20%%\\r' >&2; exit; fi\n"
      "echo plain >&2; echo '[rank 1/2 tp=1] marked' >&2"));
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_THAT(launcher.shown(), HasSubstr("10%\r"));
  EXPECT_THAT(launcher.shown(), HasSubstr("20%\r"));
  EXPECT_THAT(launcher.shown(), Not(HasSubstr("[rank 0]")));
  EXPECT_THAT(launcher.shown(), HasSubstr("[rank 1] plain\n"));
  EXPECT_THAT(launcher.shown(), Not(HasSubstr("[rank 1] [rank 1/2")));
}

TEST_F(Local, KeepsALogOfEachRank) {
  auto options = shell(2, "echo hello from $TESSERA_RANK >&2");
  options.log_dir = folder_ + "/deep/logs";
  Launcher launcher(options);
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_EQ(content("deep/logs/rank-0.log"), "hello from 0\n");
  EXPECT_EQ(content("deep/logs/rank-1.log"), "hello from 1\n");
}

TEST_F(Local, RefusesWhatItCannotStart) {
  LocalOptions options;
  options.argv = {"no-such-program-anywhere"};
  EXPECT_EQ(Launcher(options).finish(), 2);
  options.argv.clear();
  EXPECT_EQ(Launcher(options).finish(), 2);
  options.argv = {"true"};
  options.nproc = 0;
  EXPECT_EQ(Launcher(options).finish(), 2);
}

TEST_F(Local, LeavesNoDescriptorAndNoZombie) {
  auto open_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = open_descriptors();
  EXPECT_EQ(run_local(shell(3, "exit 0")), 0);
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(Verdict, SaysWhetherMemoryRanOut) {
  const detail::RankEnd end{.rank = 1, .status = SIGKILL};
  EXPECT_THAT(detail::verdict(end, {}, {.world_size = 2, .oom_kills = 1}),
              HasSubstr("want of memory meanwhile"));
  EXPECT_THAT(detail::verdict(end, {}, {.world_size = 2}),
              HasSubstr("counts no kill for want of memory"));
}

// A program that does not catch what a lost peer throws aborts before the rank
// that left has ended.
TEST_F(Local, AnAbortIsNotBlamedForAPeersEnd) {
  const auto options = shell(2, R"(
    if [ "$TESSERA_RANK" = 0 ]; then kill -ABRT $$; fi
    sleep 0.1; exit 3)");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(options), 3);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 1 of 2"));
}

TEST_F(Local, ARankThatSigkillDoesNotEndIsLeftBehindByName) {
  auto options = shell(2, R"(
    if [ "$TESSERA_RANK" = 0 ]; then exit 3; fi
    trap '' TERM; sleep 60)");
  options.grace = options.give_up = std::chrono::milliseconds(0);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(options), 3);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 1 (process "));
}

TEST_F(Local, AStoppedRankIsNamedAtOnce) {
  const auto options = shell(2, R"(
    [ "$TESSERA_RANK" = 1 ] || exit 0
    (sleep 1.5; kill -CONT $$) & kill -STOP $$; exit 0)");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(options), 0);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("tessera: rank 1 (process "));
  EXPECT_THAT(said, HasSubstr(") is stopped, by SIGSTOP: the other ranks wait "
                              "for it. It goes on by 'kill -CONT "));
}

TEST_F(Local, ARankThatAsksForATerminalIsToldThatThereIsNone) {
  const auto options = shell(1, R"(
    (sleep 3; kill -CONT $$) & kill -TTIN $$; exit 0)");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(options), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("is stopped, by SIGTTIN"),
                    HasSubstr("the terminal, which ranks have not")));
}

// Who starts a launcher may ignore it: the kernel keeps no end of a child then.
TEST_F(Local, EndsAreKnownWhereSigchldIsIgnored) {
  struct sigaction ignored{}, before{}, found{};
  ignored.sa_handler = SIG_IGN;
  sigaction(SIGCHLD, &ignored, &before);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(shell(2, "sleep 0.2; exit 3")), 3);
  EXPECT_EQ(run_local(shell(1, "kill -9 $$")), 128 + SIGKILL);
  EXPECT_EQ(run_local(shell(1, "sh -c 'exit 5'; exit $?")), 5);
  ::testing::internal::GetCapturedStderr();
  sigaction(SIGCHLD, &before, &found);
  EXPECT_EQ(found.sa_handler, SIG_IGN);
}

TEST_F(Local, ARankThatFloodsStderrDoesNotHoldUpTheOthers) {
  const auto options = shell(2, R"(
    if [ "$TESSERA_RANK" = 0 ]; then exec yes warning >&2; fi
    sleep 0.3; exit 7)");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_local(options), 7);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 1 of 2"));
}

TEST_F(Local, StderrThatNobodyReadsDoesNotStopTheRanks) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const auto options = shell(2, "yes | head -c 3000000 >&2; touch done");
  const pid_t launcher = fork();
  if (launcher == 0) {
    dup2(ends[1], STDERR_FILENO);
    exit(run_local(options));
  }
  close(ends[1]);
  int status = -1;
  ASSERT_EQ(waitpid(launcher, &status, 0), launcher);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/done"));
  close(ends[0]);
}

}  // namespace
}  // namespace tessera::launch
