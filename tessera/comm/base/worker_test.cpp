#include "tessera/comm/base/worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;

class WorkerTest : public ::testing::Test {
 protected:
  ~WorkerTest() override { worker_->close(); }

  c10::intrusive_ptr<PendingWork> work() {
    return c10::make_intrusive<PendingWork>(0, c10d::OpType::BARRIER,
                                            std::vector<at::Tensor>(), worker_);
  }

  std::vector<std::string> failures_;
  std::shared_ptr<Worker> worker_ = std::make_shared<Worker>(
      [this](const std::string& why) { failures_.push_back(why); });
};

TEST_F(WorkerTest, RunsInTheOrderOfTheCalls) {
  std::vector<int> order;
  const auto first = work(), second = work(), third = work();
  worker_->submit(first, [&] { order.push_back(1); });
  worker_->submit(second, [&] { order.push_back(2); });
  worker_->run(third, [&] { order.push_back(3); });
  EXPECT_TRUE(first->isCompleted());
  EXPECT_TRUE(second->isCompleted());
  EXPECT_TRUE(third->isCompleted());
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST_F(WorkerTest, ABlockingCallStaysOnItsThread) {
  std::thread::id ran_on;
  worker_->run(work(), [&] { ran_on = std::this_thread::get_id(); });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST_F(WorkerTest, WhatFollowsAFailureFailsWithIt) {
  const auto failing = work(), later = work();
  bool ran = false;
  worker_->submit(failing, [] { TS_CHECK(false, "the first reason"); });
  worker_->submit(later, [&] { ran = true; });
  EXPECT_ANY_THROW(failing->wait());
  EXPECT_ANY_THROW(later->wait());
  EXPECT_FALSE(ran);
  EXPECT_THAT(failures_, ElementsAre("the first reason"));
}

// A peer, or a message that it left behind, may still move it.
TEST(Worker, WhatAFailedBodyHoldsOutlivesIt) {
  for (const bool blocking : {false, true}) {
    std::weak_ptr<int> seen;
    {
      const auto worker = std::make_shared<Worker>([](const std::string&) {});
      const auto failing = c10::make_intrusive<PendingWork>(
          0, c10d::OpType::BARRIER, std::vector<at::Tensor>(), worker);
      const auto held = std::make_shared<int>(1);
      seen = held;
      const auto body = [held] { TS_CHECK(false, "no"); };
      blocking ? worker->run(failing, body) : worker->submit(failing, body);
      EXPECT_ANY_THROW(failing->wait());
      worker->close();
    }
    EXPECT_FALSE(seen.expired()) << "blocking: " << blocking;
  }
}

// A backend may be closed, and dropped, while another thread waits.
TEST_F(WorkerTest, OneWhoWaitsSurvivesTheEnd) {
  std::promise<void> begun, go_on;
  const auto pending = work();
  worker_->submit(pending, [&] {
    begun.set_value();
    go_on.get_future().wait();
  });
  begun.get_future().wait();
  auto waiting = std::async(std::launch::async, [&] { pending->wait(); });
  auto closing = std::async(std::launch::async, [&] { worker_->close(); });
  go_on.set_value();
  closing.get();
  waiting.get();
  EXPECT_TRUE(pending->isCompleted());
}

}  // namespace
}  // namespace tessera::comm
