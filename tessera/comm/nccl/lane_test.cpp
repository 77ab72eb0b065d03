#include "tessera/comm/nccl/lane.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/timed_out.h"
#include "tessera/core/error.h"
#include "tests/support/test_device.h"

namespace tessera::comm::nccl {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What a device has to do, and does when the test says so.
struct Task final : OnDevice {
  std::atomic<bool> begun = true, ended = false;
  std::atomic<int> ordered = 0;

  bool has_begun() override { return begun; }
  bool has_ended() override { return ended; }
  void order_stream() override { ++ordered; }
  double seconds() override { return 42; }
};

struct Library final : Channel {
  std::promise<void> opens;
  std::string refuses;
  std::atomic<int> closed = 0, aborted = 0;

  void open() override {
    opens.get_future().wait();
    TS_CHECK_REACH(refuses.empty(), refuses);
  }
  void close() override { ++closed; }
  void abort() override { ++aborted; }
};

c10::intrusive_ptr<LaneWork> work_of() {
  return c10::make_intrusive<LaneWork>(0, c10d::OpType::ALLREDUCE);
}

struct OneLane {
  explicit OneLane(milliseconds timeout = std::chrono::minutes(1))
      : watch(timeout), lane(watch.make_lane(at::kCPU, library)) {}

  c10::intrusive_ptr<LaneWork> call(const std::shared_ptr<Task>& task,
                                    std::vector<int>* order = nullptr,
                                    int number = 0) {
    auto work = work_of();
    lane->submit(work, [=] {
      if (order) order->push_back(number);
      return task;
    });
    return work;
  }

  std::shared_ptr<Library> library = std::make_shared<Library>();
  Watch watch;
  std::shared_ptr<Lane> lane;
};

std::string failure_of(c10d::Work& work) {
  try {
    work.wait();
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

TEST(Lane, KeepsCallsUntilItIsOpenAndMakesThemInOrder) {
  OneLane one;
  std::vector<int> order;
  const auto task = std::make_shared<Task>();
  std::vector<c10::intrusive_ptr<LaneWork>> works;
  for (int i = 0; i < 3; ++i) works.push_back(one.call(task, &order, i));
  EXPECT_TRUE(order.empty());  // and no call has waited for that
  one.library->opens.set_value();
  for (const auto& work : works) {
    EXPECT_TRUE(work->wait());  // it is on the stream, and not done
    EXPECT_FALSE(work->isCompleted());
  }
  EXPECT_EQ(task->ordered, 3);
  works.push_back(one.call(task, &order, 3));
  works.back()->wait();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3));
  task->ended = true;
  one.lane->close(std::chrono::minutes(1));  // until all is done
  for (const auto& work : works) {
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(work->seconds(), 42);
  }
  EXPECT_EQ(one.library->closed, 1);
  EXPECT_EQ(one.library->aborted, 0);
}

TEST(Lane, ThatDoesNotOpenFailsWhatItKept) {
  OneLane one;
  one.library->refuses = "waited in vain";
  const auto first = one.call(std::make_shared<Task>());
  const auto second = one.call(std::make_shared<Task>());
  one.library->opens.set_value();
  EXPECT_THAT(failure_of(*first), HasSubstr("waited in vain"));
  EXPECT_THAT(failure_of(*second), HasSubstr("given up"));
  EXPECT_THAT(failure_of(*one.call(std::make_shared<Task>())),
              HasSubstr("given up"));
  one.lane->close(std::chrono::minutes(1));
  EXPECT_EQ(one.library->closed + one.library->aborted, 0);
}

TEST(Lane, TimeCountsFromWhereTheDeviceCameToIt) {
  const auto work = work_of();
  const auto task = std::make_shared<Task>();
  task->begun = false;
  work->put(task);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(work->look(milliseconds(-1)));
  task->begun = true;
  EXPECT_FALSE(work->look(milliseconds(-1)));
  EXPECT_THROW(work->look(milliseconds(-1)), TimedOut);
  task->ended = true;
  EXPECT_TRUE(work->look(milliseconds(-1)));
}

TEST(Lane, OneThatIsTooLateEndsAllLanesOfTheRank) {
  OneLane one(milliseconds(20));
  const auto other = std::make_shared<Library>();
  const auto beside = one.watch.make_lane(at::kCPU, other);
  const auto waiting = std::make_shared<Task>();
  waiting->begun = false;
  const auto kept = work_of();
  other->opens.set_value();
  beside->submit(kept, [&] { return waiting; });
  kept->wait();
  one.library->opens.set_value();
  const auto late = one.call(std::make_shared<Task>());
  late->getFuture()->wait();
  kept->getFuture()->wait();
  EXPECT_THAT(failure_of(*late), HasSubstr("timed out. "));
  EXPECT_THAT(failure_of(*kept), HasSubstr("given up"));
  one.lane->close(std::chrono::minutes(1));
  beside->close(std::chrono::minutes(1));
  one.watch.fail("again");  // until what was aborted is
  EXPECT_EQ(one.library->aborted, 1);
  EXPECT_EQ(other->aborted, 1);
}

// Whoever hears of a lost rank gives all lanes up, whatever the watch looks at.
TEST(Lane, IsGivenUpWhileTheWatchLooksAtItsFirstCall) {
  struct LostMeanwhile final : OnDevice {
    Watch& watch;
    explicit LostMeanwhile(Watch& of) : watch(of) {}
    bool has_begun() override { return true; }
    bool has_ended() override {
      watch.fail("rank 1 is lost");
      return true;
    }
    void order_stream() override {}
    double seconds() override { return 1; }
  };
  OneLane one;
  one.library->opens.set_value();
  const auto task = std::make_shared<LostMeanwhile>(one.watch);
  const auto work = work_of();
  one.lane->submit(work, [&] { return task; });
  work->getFuture()->wait();
  EXPECT_THAT(failure_of(*work), HasSubstr("rank 1 is lost"));
  one.lane->close(std::chrono::minutes(1));
  EXPECT_THAT(failure_of(*one.call(std::make_shared<Task>())),
              HasSubstr("rank 1 is lost"));
}

TEST(Lane, WhoWaitsWhileItsFutureFailsHearsOfIt) {
  const auto work = work_of();
  work->put(std::make_shared<Task>());
  std::future<std::string> heard;
  work->getFuture()->addCallback([&](c10::ivalue::Future&) {
    heard = std::async(std::launch::async, [&] { return failure_of(*work); });
    EXPECT_EQ(heard.wait_for(milliseconds(50)), std::future_status::timeout);
  });
  work->complete(std::make_exception_ptr(Error(ExitCode::kFailed, "it broke")));
  EXPECT_THAT(heard.get(), HasSubstr("it broke"));
}

// All reductions of a device's tensors.
class LaneBackend final : public c10d::Backend {
 public:
  explicit LaneBackend(OneLane& one) : Backend(0, 2), one_(one) {}
  const std::string getBackendName() const override { return "lane"; }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return one_.call(task);
  }
  std::shared_ptr<Task> task = std::make_shared<Task>();

 private:
  OneLane& one_;
};

// A group over a lane of the test device, and another one of the rank.
struct OnLane {
  explicit OnLane(milliseconds timeout) : one(timeout) {
    one.library->opens.set_value();
  }
  ~OnLane() { one.lane->close(std::chrono::minutes(1)); }

  GroupInfo info(const std::string& name) const {
    return {.name = name,
            .backend = "lane",
            .ranks = {0, 1},
            .rank = 0,
            .timeout = milliseconds(20),
            .rank_failure = note};
  }

  std::shared_ptr<FailureNote> note = std::make_shared<FailureNote>();
  OneLane one;
  c10::intrusive_ptr<LaneBackend> backend =
      c10::make_intrusive<LaneBackend>(one);
  Connection connection = {.backend = backend,
                           .device = testing::has_test_device()
                                         ? testing::test_device().type()
                                         : c10::kCUDA};
  BackendGroup::Judge judge = {
      .verdict = [](const auto&) { return std::string("rank 1 is missing"); },
      .record = [] {}};
  BackendGroup group{info("dp"), connection, judge};
  BackendGroup other{info("tp"), connection, judge};
};

std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kUnreachable);
    return error.what_without_backtrace();
  }
  return "";
}

TEST(GroupOnLanes, CountsByTheDeviceAndDoesNotWaitForIt) {
  if (!testing::has_test_device()) GTEST_SKIP() << "needs a GPU";
  OnLane on{std::chrono::minutes(1)};
  const at::Tensor x = at::ones({4}, testing::test_device());
  Work work = on.group.all_reduce(x, ReduceOp::kSum, Mode::kBlocking);
  EXPECT_THAT(on.group.flight_record(), HasSubstr("pending"));
  EXPECT_TRUE(on.group.stats().empty());
  on.backend->task->ended = true;
  on.one.lane->close(std::chrono::minutes(1));
  ASSERT_EQ(on.group.stats().size(), 1u);
  EXPECT_EQ(on.group.stats()[0].bytes, 16);
  EXPECT_EQ(on.group.stats()[0].seconds, 42);
  EXPECT_THAT(on.group.flight_record(), HasSubstr("done in 42 s"));
}

TEST(GroupOnLanes, AFailureHasItsVerdictAndEndsAllGroupsOfTheRank) {
  if (!testing::has_test_device()) GTEST_SKIP() << "needs a GPU";
  OnLane on(milliseconds(20));
  const at::Tensor x = at::ones({4}, testing::test_device());
  Work work = on.group.all_reduce(x, ReduceOp::kSum, Mode::kAsync);
  while (on.note->text().empty()) std::this_thread::yield();
  const auto told =
      AllOf(HasSubstr("all_reduce(sum) #1 float32[4] on group 'dp'"),
            HasSubstr("timed out. "), HasSubstr("Verdict: rank 1 is missing"));
  EXPECT_THAT(failure_of([&] { work.synchronize(); }), told);
  EXPECT_THAT(on.group.flight_record(), HasSubstr("failed after"));
  for (BackendGroup* each : {&on.group, &on.other}) {
    EXPECT_THAT(failure_of([&] { each->barrier(); }),
                AllOf(told, HasSubstr("cannot go on after")));
  }
}

}  // namespace
}  // namespace tessera::comm::nccl
