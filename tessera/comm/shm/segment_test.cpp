#include "tessera/comm/shm/segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <future>
#include <iterator>
#include <mutex>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/shm/peer_watch.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"

namespace tessera::comm::shm {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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

// Of a rank that hears nothing of failures until it goes on.
class StoppedStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  bool check(const std::vector<std::string>& keys) override {
    if (keys.front() == "failure") {
      std::unique_lock lock(mutex_);
      is_asked_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return goes_on_; });
    }
    return PrefixStore::check(keys);
  }
  void wait_until_asked() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_asked_; });
  }
  void go_on() {
    const std::lock_guard lock(mutex_);
    goes_on_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_asked_ = false, goes_on_ = false;
};

TEST(Segment, AStoreThatDoesNotAnswerEndsTheWait) {
  const auto store = c10::make_intrusive<StoppedStore>(
      "all", c10::make_intrusive<c10d::HashStore>());
  Place place = place_of(0);
  place.timeout = std::chrono::milliseconds(100);
  EXPECT_THAT(failure_of([&] { Segment(Rendezvous(store, "g"), place); }),
              HasSubstr("the rendezvous store does not answer"));
  store->go_on();  // the thread that was left behind
}

// Rank 1 attaches, and stands still while the others have gone on.
TEST(Segment, NamesTheRankThatDoesNotGoOn) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  const auto store = c10::make_intrusive<c10d::PrefixStore>("all", hash);
  const auto stopped = c10::make_intrusive<StoppedStore>("all", hash);
  const auto make = [&](c10::intrusive_ptr<c10d::Store> own, int64_t rank,
                        std::chrono::milliseconds timeout) {
    Place place = place_of(rank);
    place.ranks = {0, 1, 2};
    place.timeout = timeout;
    return std::async(std::launch::async, [own = std::move(own), place] {
      return failure_of([&] { Segment(Rendezvous(own, "g"), place); });
    });
  };
  auto first = make(store, 0, std::chrono::seconds(2));
  Rendezvous(store, "g").get("segment", std::chrono::seconds(20), "it");
  auto second = make(stopped, 1, std::chrono::seconds(20));
  stopped->wait_until_asked();
  auto third = make(store, 2, std::chrono::seconds(2));
  for (auto* rank : {&first, &third}) {
    EXPECT_THAT(rank->get(), HasSubstr("no sign of rank(s) 1 within 2000 ms"));
  }
  stopped->go_on();
  second.wait();
}

TEST(Segment, TellsOfACallBeforeItsFirstMeeting) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto making = std::async(std::launch::async, [&] {
    return std::make_unique<Segment>(Rendezvous(store, "g"), place_of(0));
  });
  const Segment segment(Rendezvous(store, "g"), place_of(1));
  const auto peer = making.get();
  EXPECT_EQ(segment.last_call_of(0), std::nullopt);
  Lane& lane = peer->own_lane();
  lane.begun = 1;
  EXPECT_THAT(*segment.last_call_of(0),
              StartsWith("is in collective #1, for "));
  lane.calls[1].store({.sequence = 1, .verb = Verb::kBarrier});
  lane.arrival.value = 1;
  EXPECT_THAT(*segment.last_call_of(0), StartsWith("is in barrier #1, for "));
  lane.finished = 1;
  EXPECT_THAT(*segment.last_call_of(0), StartsWith("last did barrier #1, "));
  lane.begun = 2;
  EXPECT_THAT(*segment.last_call_of(0),
              StartsWith("is in collective #2, for "));
}

// As a sandbox does.
void refuse_pidfds() {
  sock_filter steps[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{.len = std::size(steps), .filter = steps};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST(PeerWatch, WatchesNobodyWhereTheSystemGivesNoPidfds) {
  const auto go_on_without = [] {
    refuse_pidfds();
    const auto watched = watch_process(getppid(), [] { std::_Exit(1); });
    std::_Exit(0);
  };
  EXPECT_EXIT(go_on_without(), ::testing::ExitedWithCode(0), "");
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
