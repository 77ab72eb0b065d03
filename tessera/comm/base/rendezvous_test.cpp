#include "tessera/comm/base/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/core/error.h"
#include "tests/support/failure_of.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

// As the client of a store whose host was cut off.
class SilentStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& /*keys*/) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ends_; });
    return false;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
};

TEST(Rendezvous, AStoreThatDoesNotAnswerEndsTheWait) {
  const auto store = c10::make_intrusive<SilentStore>();
  Rendezvous rendezvous(store, "group");
  try {
    rendezvous.get("key", std::chrono::milliseconds(50), "rank 1");
    ADD_FAILURE() << "it came back";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kUnreachable);
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("waited 50 ms for rank 1, and the rendezvous store "
                          "does not answer"));
  }
  store->end();  // the thread that was left behind
}

TEST(Rendezvous, WhetherARankFailedIsAskedInTime) {
  const auto store = c10::make_intrusive<SilentStore>();
  Rendezvous rendezvous(store, "group");
  EXPECT_THAT(testing::failure_of([&] {
                rendezvous.check_no_failure(std::chrono::milliseconds(50));
              }),
              HasSubstr("the rendezvous store does not answer"));
  store->end();
}

TEST(Rendezvous, OneTimeOutIsForAllRanks) {
  Rendezvous rendezvous(c10::make_intrusive<c10d::HashStore>(), "group");
  std::jthread ranks([=]() mutable {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    rendezvous.set("0", "here");
    std::this_thread::sleep_for(std::chrono::milliseconds(1900));
    rendezvous.set("1", "late");
  });
  EXPECT_THAT(testing::failure_of([&] {
                rendezvous.get_each("", 2, std::chrono::seconds(2), "rank");
              }),
              HasSubstr("waited 2000 ms for rank 1, in vain"));
}

TEST(Rendezvous, RanksThatMeetAreGivenWhatEachSaid) {
  Rendezvous rendezvous(c10::make_intrusive<c10d::HashStore>(), "group");
  rendezvous.set("of-0", "a");
  rendezvous.set("of-1", "b");
  EXPECT_THAT(rendezvous.get_each("of-", 2, std::chrono::seconds(5), "rank"),
              ::testing::ElementsAre("a", "b"));
}

TEST(Rendezvous, WhatIsThereIsGiven) {
  Rendezvous rendezvous(c10::make_intrusive<c10d::HashStore>(), "group");
  rendezvous.set("key", "value");
  EXPECT_EQ(rendezvous.get("key", std::chrono::seconds(5), "it"), "value");
}

}  // namespace
}  // namespace tessera::comm
