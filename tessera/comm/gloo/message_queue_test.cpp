#include "tessera/comm/gloo/message_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::comm::gloo {
namespace {

// Ends, or fails, when it is told to; an abort ends one wait.
class Told : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    is_awaited_ = true;
    changed_.notify_all();
    const auto ended = [&] { return is_told_ || is_aborted_; };
    if (timeout == kNoTimeout) {
      changed_.wait(lock, ended);
    } else {
      TS_CHECK(changed_.wait_for(lock, timeout, ended), "it came too late");
    }
    TS_CHECK(!fails_, "the line was closed");
    return !std::exchange(is_aborted_, false);
  }
  void until_awaited() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_awaited_; });
  }
  void abort() override {
    if (is_late_) end();
    tell(&Told::is_aborted_);
  }
  // It ends just before it is aborted.
  void be_late() { is_late_ = true; }
  void end() { tell(&Told::is_told_); }
  void fail() {
    fails_ = true;
    end();
  }

 private:
  void tell(bool Told::* what) {
    const std::lock_guard lock(mutex_);
    this->*what = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_awaited_ = false, is_told_ = false, is_aborted_ = false;
  std::atomic<bool> fails_ = false, is_late_ = false;
};

struct Sent {
  c10::intrusive_ptr<Told> message = c10::make_intrusive<Told>();
  c10::intrusive_ptr<Told> line = c10::make_intrusive<Told>();
  c10::intrusive_ptr<PendingWork> work;

  explicit Sent(const std::shared_ptr<MessageQueue>& queue)
      : work(c10::make_intrusive<PendingWork>(
            0, c10d::OpType::SEND, std::vector<at::Tensor>(), queue)) {
    queue->submit(message, work, line);
  }
};

TEST(MessageQueue, OneThatNobodyWaitsForEndsByItself) {
  const auto queue = std::make_shared<MessageQueue>();
  const Sent one(queue), other(queue);
  other.message->end();
  one.message->end();
  EXPECT_TRUE(other.work->wait());
  EXPECT_TRUE(one.work->wait());
  queue->close();
}

TEST(MessageQueue, WhereOneFailsNobodyWaitsForTheOthers) {
  const auto queue = std::make_shared<MessageQueue>();
  const Sent lost(queue), later(queue), failed(queue);
  std::thread fails([&] {
    lost.message->until_awaited();
    failed.message->fail();
  });
  std::thread waits([&] { EXPECT_THROW(failed.work->wait(), std::exception); });
  EXPECT_THROW(lost.work->wait(), std::exception);
  EXPECT_THROW(later.work->wait(), std::exception);
  const Sent after(queue);
  EXPECT_THROW(after.work->wait(), std::exception);
  fails.join();
  waits.join();
  queue->close();
}

TEST(MessageQueue, OneWhoseLineClosesFails) {
  const auto queue = std::make_shared<MessageQueue>();
  const Sent half(queue);
  half.message->until_awaited();
  half.line->fail();
  EXPECT_THROW(half.work->wait(), std::exception);
  queue->close();
}

// Its peer was done, and has closed its lines.
TEST(MessageQueue, OneThatEndedBeforeItsLineClosedHasNotFailed) {
  const auto queue = std::make_shared<MessageQueue>();
  const Sent last(queue), of_another(queue);
  last.message->be_late();
  last.line->fail();
  EXPECT_TRUE(last.work->wait());
  of_another.message->end();
  EXPECT_TRUE(of_another.work->wait());
  queue->close();
}

}  // namespace
}  // namespace tessera::comm::gloo
