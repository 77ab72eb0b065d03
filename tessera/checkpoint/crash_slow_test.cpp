// Kills and fails a save at every one of its calls to the system.
//
// This program defines the calls that change files itself: they count those
// that touch the folder under test, and kill the process or fail at the n-th.
// Nothing in the code under test knows of it.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/test_state.h"
#include "tessera/checkpoint/local.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace {

struct Faults {
  std::mutex mutex;
  std::string folder;  // calls on paths below it count; empty: none do
  int64_t calls = 0;
  int64_t at = 0;  // of the call that fails; 0: none
  int code = 0;    // errno of it; 0: the process is killed instead
  bool short_writes = false;
  bool no_exchange = false;  // a file system that cannot swap two folders
};
Faults faults;

// True when this call is to fail, with errno set.
bool fails(const char* path) {
  const std::lock_guard lock(faults.mutex);
  if (faults.folder.empty() || path == nullptr) return false;
  if (std::string_view(path).substr(0, faults.folder.size()) != faults.folder) {
    return false;
  }
  if (++faults.calls != faults.at) return false;
  if (faults.code == 0) ::kill(::getpid(), SIGKILL);
  errno = faults.code;
  return true;
}

bool fails(int descriptor) {
  if (faults.folder.empty()) return false;
  std::array<char, PATH_MAX> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const auto size = ::readlink(link.c_str(), path.data(), path.size() - 1);
  return size > 0 && fails(path.data());
}

}  // namespace

extern "C" {
int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = va_arg(arguments, mode_t);
  va_end(arguments);
  if ((flags & (O_CREAT | O_WRONLY)) != 0 && fails(path)) return -1;
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
ssize_t write(int descriptor, const void* data, size_t size) {
  if (fails(descriptor)) {
    if (!faults.short_writes || size < 2) return -1;
    size /= 2;
  }
  return ::syscall(SYS_write, descriptor, data, size);
}
int fsync(int descriptor) {
  return fails(descriptor) ? -1
                           : static_cast<int>(::syscall(SYS_fsync, descriptor));
}
int mkdir(const char* path, mode_t mode) noexcept {
  return fails(path)
             ? -1
             : static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
int rename(const char* from, const char* to) noexcept {
  return fails(from) ? -1
                     : static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from,
                                                  AT_FDCWD, to, 0));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  if (faults.no_exchange && (flags & RENAME_EXCHANGE) != 0) {
    errno = EINVAL;
    return -1;
  }
  return fails(from) ? -1
                     : static_cast<int>(::syscall(SYS_renameat2, from_folder,
                                                  from, to_folder, to, flags));
}
int unlink(const char* path) noexcept {
  return fails(path)
             ? -1
             : static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  const bool fail = path[0] == '/' ? fails(path) : fails(folder);
  return fail ? -1
              : static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
}

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::run_threads;
using ::testing::HasSubstr;

constexpr int64_t kRanks = 2;
constexpr uint64_t kSeed = 3;

void save_step(const std::string& folder, int64_t step, int64_t keep = 1) {
  run_threads(kRanks, "shm", [&](Communicator& all) {
    save(folder, step, detail::test_state(step, kSeed, all.rank(), kRanks),
         all.world(), {.keep = keep});
  });
}

// The same, beside other work.
void save_step_beside(const std::string& folder, int64_t step) {
  run_threads(kRanks, "shm", [&](Communicator& all) {
    const State state = detail::test_state(step, kSeed, all.rank(), kRanks);
    BackgroundSave(folder, step, state, all.world(), {.keep = 1}).finish();
  });
}

// The step that loads, with all its bits.
std::optional<int64_t> loaded_step(const std::string& folder) {
  std::optional<int64_t> step;
  run_threads(1, "shm", [&](Communicator& all) {
    State state = detail::empty_state(0, 0, 1);
    step = load_latest(folder, state, all.world());
    if (step) {
      EXPECT_EQ(detail::first_difference(state, *step), "");
    }
  });
  return step;
}

class CrashTest : public ::testing::Test {
 protected:
  CrashTest() { save_step(base_, 1); }
  ~CrashTest() override { disarm(); }

  // A folder that holds step 1.
  void fresh_folder() {
    fs::remove_all(folder_);
    fs::copy(base_, folder_, fs::copy_options::recursive);
  }

  void arm(int64_t at, int code, bool short_writes = false) {
    const std::lock_guard lock(faults.mutex);
    faults.folder = folder_;
    faults.calls = 0;
    faults.at = at;
    faults.code = code;
    faults.short_writes = short_writes;
  }
  static void disarm() {
    const std::lock_guard lock(faults.mutex);
    faults.folder.clear();
    faults.no_exchange = false;
  }

  // How many calls the save makes that nothing disturbs.
  int64_t count_calls(const std::function<void()>& work) {
    arm(0, 0);
    work();
    disarm();
    return faults.calls;
  }

  TemporaryFolder temporary_;
  const std::string base_ = temporary_.file("base");
  const std::string folder_ = temporary_.file("checkpoints");
};

// Runs `work` in a process of its own; its wait status.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    // LibTorch makes its pool anew after a fork, by one thread at a time.
    at::set_num_threads(1);
    work();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

// How step 2 is saved.
class EachCallTest : public CrashTest,
                     public ::testing::WithParamInterface<void (*)(
                         const std::string&, int64_t)> {};

INSTANTIATE_TEST_SUITE_P(
    Saves, EachCallTest,
    ::testing::Values([](const std::string& folder,
                         int64_t step) { save_step(folder, step); },
                      save_step_beside),
    [](const auto& of) { return of.index == 0 ? "Plain" : "Beside"; });

TEST_P(EachCallTest, KilledAtItTheNewOrTheOldOneLoads) {
  fresh_folder();
  const int64_t calls = count_calls([&] { GetParam()(folder_, 2); });
  ASSERT_GT(calls, 20);
  int64_t olds = 0;
  int64_t news = 0;
  for (int64_t at = 1; at <= calls; ++at) {
    fresh_folder();
    const int status = in_child([&] {
      arm(at, 0);
      GetParam()(folder_, 2);
    });
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << at;
    const auto step = loaded_step(folder_);
    ASSERT_TRUE(step == 1 || step == 2) << "killed at call " << at;
    (step == 1 ? olds : news) += 1;
    // And the run goes on from there.
    save_step(folder_, 3);
    ASSERT_EQ(loaded_step(folder_), 3);
    ASSERT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2) << at;
  }
  EXPECT_GT(olds, 10);
  EXPECT_GT(news, 2);
}

TEST_F(CrashTest, KilledWhileReplacingAStepSomeCheckpointLoads) {
  fresh_folder();
  save_step(folder_, 2, 0);
  fs::remove_all(base_);
  fs::copy(folder_, base_, fs::copy_options::recursive);
  const int64_t calls = count_calls([&] { save_step(folder_, 2, 0); });
  for (int64_t at = 1; at <= calls; ++at) {
    fresh_folder();
    const int status = in_child([&] {
      arm(at, 0);
      save_step(folder_, 2, 0);
    });
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << at;
    ASSERT_EQ(loaded_step(folder_), 2) << "killed at call " << at;
  }
}

TEST_F(CrashTest, AStepIsNotLostWhereReplacingItFails) {
  for (int64_t at = 1;; ++at) {
    fresh_folder();
    arm(at, EIO);
    faults.no_exchange = true;
    try {
      save_step(folder_, 1);
    } catch (const Error&) {
      // Whether the old or the new one stands: step 1 loads.
    }
    const bool all_were_tried = faults.calls < at;
    disarm();
    ASSERT_EQ(loaded_step(folder_), 1) << "call " << at;
    if (all_were_tried) break;
  }
}

TEST_P(EachCallTest, MayFailAndEarlierCheckpointsStay) {
  fresh_folder();
  const int64_t calls = count_calls([&] { GetParam()(folder_, 2); });
  for (const int code : {ENOSPC, EIO}) {
    for (int64_t at = 1; at <= calls; ++at) {
      fresh_folder();
      arm(at, code);
      std::string said;
      try {
        GetParam()(folder_, 2);
      } catch (const Error& error) {
        said = error.what_without_backtrace();
        EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
      }
      disarm();
      const auto step = loaded_step(folder_);
      if (said.empty()) {
        // Only tidying failed, or the way of replacing: step 2 stands.
        ASSERT_EQ(step, 2) << "call " << at;
      } else {
        ASSERT_TRUE(step == 1 || step == 2) << "call " << at << ": " << said;
        EXPECT_THAT(said, HasSubstr(folder_));
        EXPECT_THAT(said, HasSubstr(std::strerror(code)));
        EXPECT_THAT(said, HasSubstr("was not saved"));
      }
      save_step(folder_, 3);
      ASSERT_EQ(loaded_step(folder_), 3);
    }
  }
}

TEST_F(CrashTest, ShortWritesAreContinued) {
  fresh_folder();
  const int64_t calls = count_calls([&] { save_step(folder_, 2); });
  for (int64_t at = 1; at <= calls; ++at) {
    fresh_folder();
    arm(at, ENOSPC, /*short_writes=*/true);
    try {
      save_step(folder_, 2);
    } catch (const Error&) {
      // Calls other than write failed as ever.
    }
    disarm();
    ASSERT_TRUE(loaded_step(folder_).has_value());
  }
}

// A disk that is really full: a tmpfs where this process may mount one, else a
// limit on the size of files.
TEST_F(CrashTest, AFullDiskIsSaidWithPathAndBytes) {
  constexpr int64_t kDisk = int64_t{1} << 20;
  fresh_folder();
  const auto big_state = [] {
    State state;
    state.tensors.push_back(
        {"w", {kDisk}, {{0}, {kDisk}}, at::ones({kDisk}), true});
    return state;
  };
  const int status = in_child([&] {
    const bool mounted =
        ::unshare(CLONE_NEWNS) == 0 &&
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
        ::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=1m") == 0;
    if (!mounted) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{kDisk, kDisk};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    std::string said;
    const auto alone = comm::make_communicator({});
    save(folder_, 1, detail::test_state(1, 0, 0, 1), alone->world());
    try {
      save(folder_, 2, big_state(), alone->world());
    } catch (const Error& error) {
      said = error.what_without_backtrace();
    }
    const bool named =
        said.find(mounted ? "ENOSPC" : "EFBIG") != std::string::npos &&
        said.find(folder_) != std::string::npos;
    State loaded = detail::empty_state(0, 0, 1);
    const bool clean =
        !fs::exists(folder_ + "/step-2.tmp") && loaded_step(folder_) == 1;
    ::_exit(named && clean ? 0 : 1);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Two hosts, each with a rank and a folder below the one under test.
class LocalCrashTest : public CrashTest {
 protected:
  void on_hosts(const std::function<void(LocalCheckpoints&, int64_t)>& work) {
    const std::vector<std::string> hosts = {"a", "b"};
    const std::string dir = folder_ + "/checkpoints";
    fs::create_directories(dir);
    run_threads(kRanks, "shm", [&](Communicator& all) {
      LocalCheckpoints local({folder_ + "/" + hosts[all.rank()], dir},
                             all.world(), hosts);
      work(local, all.rank());
    });
  }
  void save_locally(int64_t step) {
    on_hosts([&](LocalCheckpoints& local, int64_t rank) {
      local.save(step, detail::test_state(step, kSeed, rank, kRanks));
    });
  }
  std::optional<int64_t> newest() {
    std::optional<int64_t> step;
    on_hosts([&](LocalCheckpoints& local, int64_t rank) {
      State state = detail::empty_state(/*seed=*/11, rank, kRanks);
      const auto found = local.load_newest(state);
      if (found) {
        EXPECT_EQ(detail::first_difference(state, *found), "");
      }
      if (rank == 0) step = found;
    });
    return step;
  }
  void begin() {
    fs::remove_all(folder_);
    save_locally(1);
  }
  void lose_a_host() {
    begin();
    fs::remove_all(folder_ + "/b");
  }
  void kill_at(int64_t at, const std::function<void()>& work) {
    const int status = in_child([&] {
      arm(at, 0);
      work();
    });
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << at;
  }
};

TEST_F(LocalCrashTest, KilledAtEachCallTheNewOrTheOldOneLoads) {
  begin();
  const int64_t calls = count_calls([&] { save_locally(2); });
  ASSERT_GT(calls, 20);
  int64_t olds = 0, news = 0;
  for (int64_t at = 1; at <= calls; ++at) {
    begin();
    kill_at(at, [&] { save_locally(2); });
    const auto step = newest();
    ASSERT_TRUE(step == 1 || step == 2) << "killed at call " << at;
    (step == 1 ? olds : news) += 1;
    save_locally(3);
    ASSERT_EQ(newest(), 3);
  }
  EXPECT_GT(olds, 10);
  EXPECT_GT(news, 2);
}

TEST_F(LocalCrashTest, KilledAtEachCallOfLoadingItLoadsAgain) {
  lose_a_host();
  const int64_t calls = count_calls([&] { newest(); });
  ASSERT_GT(calls, 10);
  for (int64_t at = 1; at <= calls; ++at) {
    lose_a_host();
    kill_at(at, [&] { newest(); });
    ASSERT_EQ(newest(), 1) << "killed at call " << at;
  }
}

TEST_F(LocalCrashTest, EachCallMayFailAndTheOldOneStays) {
  begin();
  const int64_t calls = count_calls([&] { save_locally(2); });
  for (int64_t at = 1; at <= calls; ++at) {
    begin();
    arm(at, ENOSPC);
    std::string said;
    try {
      save_locally(2);
    } catch (const Error& error) {
      said = error.what_without_backtrace();
      EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput) << said;
    }
    disarm();
    const auto step = newest();
    ASSERT_TRUE(step == 2 || (step == 1 && !said.empty()))
        << at << ": " << said;
    save_locally(3);
    ASSERT_EQ(newest(), 3);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
