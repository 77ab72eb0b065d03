// A rank that SIGKILL does not end: its control group (of version 1) is frozen.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "tessera/core/files.h"
#include "tessera/launch/local.h"

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

// Thawed and removed at the end, with what is in it.
class FrozenGroup {
 public:
  FrozenGroup()
      : folder_("/sys/fs/cgroup/freezer/tessera-" + std::to_string(getpid())) {
    std::error_code error;
    made_ = fs::create_directory(folder_, error);
  }
  ~FrozenGroup() {
    if (!made_) return;
    std::ofstream(folder_ / "freezer.state") << "THAWED";
    std::error_code error;
    // A group goes once its processes, which were killed, are gone.
    for (int i = 0; i < 500 && !fs::remove(folder_, error); ++i) {
      std::this_thread::sleep_for(10ms);
    }
    EXPECT_FALSE(fs::exists(folder_));
  }
  bool is_made() const { return made_; }
  std::string path() const { return folder_.string(); }

 private:
  fs::path folder_;
  bool made_ = false;
};

// The exit code, or none where it is still there after so long.
std::optional<int> end_of(pid_t process, std::chrono::seconds within) {
  const auto end = std::chrono::steady_clock::now() + within;
  int status = 0;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) return std::nullopt;
    std::this_thread::sleep_for(10ms);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(FrozenRank, IsLeftBehindByName) {
  const FrozenGroup group;
  if (!group.is_made()) {
    GTEST_SKIP() << "needs the freezer of control groups, version 1, as root";
  }
  const TemporaryFolder temporary;
  const std::string said = temporary.path().string() + "/stderr";
  LocalOptions options;
  options.nproc = 2;
  options.grace = 200ms;
  options.give_up = 500ms;
  options.argv = {
      "sh", "-c",
      "cd " + group.path() +
          "\n"
          "if [ $TESSERA_RANK = 1 ]; then\n"
          "  echo $$ > cgroup.procs; echo FROZEN > freezer.state\n"
          "  exec sleep 1000\n"
          "fi\n"
          "until grep -q FROZEN freezer.state; do sleep 0.01; done\n"
          "exit 3"};
  const pid_t launcher = fork();
  if (launcher == 0) {
    dup2(open(said.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600),
         STDERR_FILENO);
    _exit(run_local(options));
  }
  const auto code = end_of(launcher, 20s);
  if (!code) {
    kill(launcher, SIGKILL);
    waitpid(launcher, nullptr, 0);
  }
  EXPECT_EQ(code, 3);
  EXPECT_THAT(read_file(said),
              ::testing::ContainsRegex(
                  "rank 1 \\(process [0-9]+\\) does not end, not even by "
                  "SIGKILL"));
}

}  // namespace
}  // namespace tessera::launch
