// What a rank is told when a peer dies, leaves, fails, is late or disagrees.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::failure_of;
using testing::failure_of_threads;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kLong = std::chrono::seconds(20);  // for what takes a moment

class AnyBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backends, AnyBackend, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

// Rank 2 dies in the middle of an all_reduce.
void die_in_all_reduce(Communicator& communicator) {
  Group& world = communicator.world();
  at::Tensor t = at::ones({3000000});
  world.all_reduce(t).wait();
  if (communicator.rank() == 2) {
    world.all_reduce(t);
    raise(SIGKILL);
  }
  while (true) world.all_reduce(t).wait();
}

TEST(Failure, SurvivorsNameTheRankThatWasKilled) {
  const auto ends = testing::fork_ranks(3, "shm", die_in_all_reduce);
  EXPECT_EQ(ends[2].signal, SIGKILL);
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].exit_code, 1);
    EXPECT_THAT(ends[rank].message,
                AllOf(HasSubstr("rank 2 (pid "), HasSubstr("has died"),
                      HasSubstr("all_reduce(sum) #"),
                      HasSubstr("float32[3000000] on group 'world'"),
                      HasSubstr("[rank " + std::to_string(rank) + "/3]"),
                      Not(HasSubstr("timed out"))));
  }
}

TEST(Failure, GlooSurvivorsEndToo) {
  const auto ends = testing::fork_ranks(3, "gloo", die_in_all_reduce);
  EXPECT_EQ(ends[2].signal, SIGKILL);
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].exit_code, 1);
    EXPECT_THAT(ends[rank].message,
                AllOf(HasSubstr("all_reduce(sum) #"), HasSubstr("gloo")));
  }
}

// Gloo's own thread throws there, where nobody can catch it.
TEST(Failure, OtherSizesOnGlooAbortNobody) {
  const auto ends = testing::fork_ranks(2, "gloo", [](Communicator& c) {
    for (int i = 0; i < 20; ++i) {
      at::Tensor t = at::ones({c.rank() == 0 ? 100000 : 300000});
      c.world().all_reduce(t).wait();
    }
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.signal, 0);
    EXPECT_EQ(end.exit_code, 1);
  }
}

TEST(Failure, ReceiverNamesTheRankThatWasKilled) {
  const auto ends = testing::fork_ranks(2, "shm", [](Communicator& c) {
    if (c.rank() == 1) {
      c.world().send(at::ones({1000000}), 0);
      raise(SIGKILL);
    }
    at::Tensor t = at::empty({1000000});
    c.world().recv(t, 1).wait();
    c.world().recv(t, 1).wait();
  });
  EXPECT_THAT(ends[0].message,
              AllOf(HasSubstr("recv #"), HasSubstr("rank 1 (pid "),
                    HasSubstr("has died")));
}

// A large message lies with its sender until it is received: it goes with it.
TEST(Failure, ReceiverNamesTheRankThatDiedWithItsMessage) {
  for (const bool registered : {false, true}) {
    const auto ends = testing::fork_ranks(2, "shm", [&](Communicator& c) {
      at::Tensor t = registered ? c.world().empty({1000000}, at::kFloat)
                                : at::empty({1000000});
      t.fill_(1);
      if (c.rank() == 1) {
        c.world().send(t, 0);
        raise(SIGKILL);
      }
      usleep(100'000);
      while (true) c.world().recv(t, 1).wait();
    });
    EXPECT_THAT(ends[0].message,
                AllOf(HasSubstr("recv #"), HasSubstr("rank 1 (pid "),
                      HasSubstr("has died")))
        << "registered: " << registered;
  }
}

// The largest tag is that of a message which tells when a line closes.
TEST(Failure, GlooRefusesTheLargestTag) {
  run_threads(2, "gloo", [](Communicator& c) {
    EXPECT_THAT(failure_of([&] {
                  c.world().send(at::ones({4}), 1 - c.rank(), INT32_MAX);
                }),
                HasSubstr("Use a smaller one"));
    at::Tensor t = at::ones({4});
    constexpr int64_t kTag = INT32_MAX - 1;
    if (c.rank() == 0) c.world().send(t, 1, kTag).wait();
    if (c.rank() == 1) c.world().recv(t, 0, kTag).wait();
  });
}

// As PyTorch's: the collectives of a group are compared before they begin.
TEST(DebugMode, NamesBothRanksThatDiffer) {
  setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL", 1);
  const std::string dtype = failure_of_threads("gloo", 3, [](Communicator& c) {
    at::Tensor t = at::ones({4}, c.rank() == 1 ? at::kInt : at::kFloat);
    c.world().all_reduce(t).wait();
  });
  EXPECT_THAT(dtype, AllOf(HasSubstr("ranks disagree: rank "),
                           HasSubstr("calls all_reduce(sum) #1 int32[4]"),
                           HasSubstr("calls all_reduce(sum) #1 float32[4]")));
  // Two sums of one shape cannot be told apart; a sum and a maximum can.
  const std::string op = failure_of_threads("gloo", 2, [](Communicator& c) {
    at::Tensor t = at::ones({4});
    c.world().all_reduce(t, c.rank() == 1 ? ReduceOp::kMax : ReduceOp::kSum);
  });
  EXPECT_THAT(op, HasSubstr("all_reduce(max) #1 float32[4]"));
  run_threads(2, "gloo", [](Communicator& c) {
    at::Tensor t = c.rank() == 0 ? at::ones({6}) : at::ones({2, 3});
    c.world().all_reduce(t).wait();
    c.world().barrier();
  });
  unsetenv("TORCH_DISTRIBUTED_DEBUG");
}

TEST(Failure, NamesARankThatLeft) {
  const std::string said = failure_of_threads("shm", 2, [](Communicator& c) {
    if (c.rank() == 0) c.world().barrier();
  });
  EXPECT_THAT(said, AllOf(HasSubstr("barrier #1"),
                          HasSubstr("rank 1 has left the group")));
}

TEST_P(AnyBackend, ThreadsAreToldOfTheFirstFailure) {
  const std::string said =
      failure_of_threads(GetParam(), 3, [](Communicator& c) {
        c.world().barrier();
        TS_CHECK_CONFIG(c.rank() != 1, "boom");
        // The others fail at once, long before the time-out.
        at::Tensor t = at::ones({4});
        c.world().all_reduce(t).wait();
      });
  EXPECT_EQ(said, "[rank 1/3] boom");
}

TEST_P(AnyBackend, ThreadsAreToldWhileTheyMakeAGroup) {
  const std::string said =
      failure_of_threads(GetParam(), 2, [](Communicator& c) {
        TS_CHECK(c.rank() != 0, "boom");
        c.make_group({0, 1}, "late");
      });
  EXPECT_EQ(said, "[rank 0/2] boom");
}

TEST(Failure, PeersSayWhyTheOtherFailed) {
  std::string said;
  EXPECT_THROW(run_threads(2, "shm",
                           [&](Communicator& c) {
                             TS_CHECK(c.rank() != 1, "boom");
                             said = failure_of([&] { c.world().barrier(); });
                           }),
               Error);
  EXPECT_THAT(said, HasSubstr("rank 1 failed: [rank 1/2] boom"));
}

// Peers that are threads may be writing to them.
TEST(Failure, TensorsOfACallThatFailedStay) {
  for (const Mode mode : {Mode::kAsync, Mode::kBlocking}) {
    std::weak_ptr<std::vector<float>> seen;
    const std::string said = failure_of_threads("shm", 2, [&](Communicator& c) {
      TS_CHECK(c.rank() != 1, "boom");
      const auto memory = std::make_shared<std::vector<float>>(300000);
      seen = memory;
      const at::Tensor t = at::from_blob(
          memory->data(), {300000}, [memory](void*) {}, at::kFloat);
      c.world().all_reduce(t, ReduceOp::kSum, mode).wait();
    });
    EXPECT_EQ(said, "[rank 1/2] boom");
    EXPECT_FALSE(seen.expired());
  }
}

// Rank 1 comes too late: it waits until rank 0 has given up.
std::string time_out(const std::string& backend) {
  std::promise<std::string> given_up;
  auto waiting = given_up.get_future().share();
  run_threads(
      2, backend,
      [&](Communicator& c) {
        c.world().barrier();
        at::Tensor t = at::ones({2, 3});
        if (c.rank() == 1) {
          waiting.wait();
          EXPECT_NE(failure_of([&] { c.world().all_reduce(t).wait(); }), "");
          return;
        }
        given_up.set_value(failure_of([&] { c.world().all_reduce(t).wait(); }));
      },
      std::chrono::seconds(1));
  return waiting.get();
}

TEST(Failure, TimeOutNamesWhoIsMissing) {
  EXPECT_THAT(
      time_out("shm"),
      AllOf(HasSubstr("[rank 0/2] all_reduce(sum) #2 float32[2, 3] on group "
                      "'world' (2 ranks, shm): timed out. Not arrived: rank 1 "
                      "(last did barrier #1, "),
            HasSubstr(" s ago)"), HasSubstr("time-out 1 s")));
}

TEST(Failure, GlooTimeOutNamesTheOperation) {
  EXPECT_THAT(time_out("gloo"),
              AllOf(HasSubstr("[rank 0/2] all_reduce(sum) #2 float32[2, 3] on "
                              "group 'world' (2 ranks, gloo): "),
                    HasSubstr("time-out 1 s")));
}

TEST(Failure, SendThatNobodyReceivesTimesOut) {
  std::promise<void> given_up;
  auto waiting = given_up.get_future().share();
  run_threads(
      2, "shm",
      [&](Communicator& c) {
        if (c.rank() == 1) return waiting.wait();
        EXPECT_THAT(
            failure_of([&] { c.world().send(at::ones({1000000}), 1).wait(); }),
            AllOf(HasSubstr("send #1 to rank 1 tag 0 float32[1000000]"),
                  HasSubstr("timed out. Nothing moved to or from rank 1"),
                  // In a group of messages nobody calls any.
                  Not(HasSubstr("called no collective"))));
        given_up.set_value();
      },
      std::chrono::seconds(1));
}

struct Disagreement {
  std::string name;
  std::function<Work(Group&)> rank0, rank1;
  std::string said;
  friend void PrintTo(const Disagreement& d, std::ostream* out) {
    *out << d.name;
  }
};

class Disagree : public ::testing::TestWithParam<Disagreement> {};

TEST_P(Disagree, IsNamedOnBothRanks) {
  const Disagreement& what = GetParam();
  run_threads(2, "shm", [&](Communicator& c) {
    const std::string said = failure_of(
        [&] { (c.rank() == 0 ? what.rank0 : what.rank1)(c.world()).wait(); });
    EXPECT_THAT(said, HasSubstr("ranks disagree: "));
    EXPECT_THAT(said, HasSubstr(what.said));
  });
}

Work reduce(Group& group, at::Tensor t, ReduceOp op = ReduceOp::kSum) {
  return group.all_reduce(std::move(t), op);
}

const std::vector<Disagreement> kDisagreements = {
    {"Sizes", [](Group& g) { return reduce(g, at::ones({4})); },
     [](Group& g) { return reduce(g, at::ones({3000000})); },
     "#1 of 3000000 float32"},
    {"NothingAndSomething", [](Group& g) { return reduce(g, at::ones({0})); },
     [](Group& g) { return reduce(g, at::ones({1})); }, "#1 of 0 float32"},
    {"Dtypes", [](Group& g) { return reduce(g, at::ones({4})); },
     [](Group& g) { return reduce(g, at::ones({4}, at::kInt)); },
     "#1 of 4 int32"},
    {"Reductions", [](Group& g) { return reduce(g, at::ones({4})); },
     [](Group& g) { return reduce(g, at::ones({4}), ReduceOp::kMax); },
     "all_reduce(max) #1"},
    {"Verbs", [](Group& g) { return reduce(g, at::ones({4})); },
     [](Group& g) { return g.all_gather(at::ones({8}), at::ones({4})); },
     "all_gather #1"},
    {"Roots", [](Group& g) { return g.broadcast(at::ones({4}), 0); },
     [](Group& g) { return g.broadcast(at::ones({4}), 1); },
     "from group rank 1"},
    {"Splits",
     [](Group& g) {
       return g.all_to_all(at::ones({3}), at::ones({3}), {1, 2}, {1, 2});
     },
     [](Group& g) {
       return g.all_to_all(at::ones({3}), at::ones({3}), {1, 2}, {2, 1});
     },
     "rank 0 sends 8 bytes to rank 1, which expects 4"}};

INSTANTIATE_TEST_SUITE_P(What, Disagree, ::testing::ValuesIn(kDisagreements),
                         [](const auto& info) { return info.param.name; });

TEST(Failure, OfAMessageThatDoesNotFitIsNamed) {
  run_threads(2, "shm", [](Communicator& c) {
    const std::string said = failure_of([&] {
      // The sender may be done before: it learns of it at its next call.
      if (c.rank() == 0) c.world().send(at::ones({4}), 1, 7).wait();
      if (c.rank() == 1) c.world().recv(at::ones({5}), 0, 7).wait();
      c.world().barrier();
    });
    EXPECT_THAT(said, HasSubstr("rank 1 receives 5 float32 from rank 0 with "
                                "tag 7, which sent 4 float32"));
  });
}

TEST(Failure, OfADroppedWorkSurfacesAtTheNextCall) {
  run_threads(2, "shm", [](Communicator& c) {
    Group& world = c.world();
    const int64_t numel = c.rank() == 0 ? 4 : 5;
    const std::string said = failure_of([&] {
      world.all_reduce(at::ones({numel}));
      while (true) world.barrier();
    });
    EXPECT_THAT(said, HasSubstr("ranks disagree"));
    EXPECT_THAT(failure_of([&] { world.barrier(); }),
                AllOf(HasSubstr("group 'world' cannot go on"),
                      HasSubstr("ranks disagree")));
  });
}

// None of these reaches a peer: the group goes on.
TEST(Failure, BadArgumentsNameTheCall) {
  const at::Tensor four = at::ones({4});
  const std::vector<std::pair<std::function<void(Group&)>, std::string>> calls =
      {{[&](Group& g) { g.all_reduce(at::Tensor()); }, "undefined"},
       {[&](Group& g) { g.all_reduce(at::ones({2, 3}).t()); },
        "all_reduce on group 'world' (2 ranks): tensor [3, 2] with strides"},
       {[&](Group& g) { g.all_reduce(at::ones({2}, at::kMeta)); }, "meta"},
       {[&](Group& g) {
          g.all_reduce(at::ones({2}, at::kInt), ReduceOp::kMean);
        },
        "mean"},
       {[&](Group& g) { g.all_reduce(at::ones({2}, at::kBool)); }, "bool"},
       {[&](Group& g) { g.all_gather(at::ones({7}), four); },
        "output holds 7 elements, expected 2 x 4 = 8"},
       {[&](Group& g) { g.all_gather(at::ones({8}, at::kInt), four); },
        "one dtype"},
       {[&](Group& g) { g.reduce_scatter(four, four); },
        "input holds 4 elements, expected 2 x 4 = 8"},
       {[&](Group& g) { g.all_to_all(at::ones({3}), four); }, "output has 3"},
       {[&](Group& g) { g.all_to_all(four, four, {1, 2}, {2, 2}); },
        "output splits [1, 2]"},
       {[&](Group& g) { g.all_to_all(four, four, {2, 2}, {5, -1}); },
        "input splits [5, -1]"},
       {[&](Group& g) { g.broadcast(four, 2); }, "root 2"},
       {[&](Group& g) { g.send(four, -1); }, "peer -1"},
       {[&](Group& g) { g.send(four, g.rank()); }, "this rank itself"},
       {[&](Group& g) { g.recv(four, 1 - g.rank(), -4); }, "tag -4"}};
  run_threads(2, "shm", [&](Communicator& c) {
    for (const auto& [call, said] : calls) {
      EXPECT_THAT(failure_of([&] { call(c.world()); }), HasSubstr(said));
    }
    c.world().barrier();
  });
}

TEST(Failure, GlooRefusesToReduceInt16) {
  run_threads(2, "gloo", [](Communicator& c) {
    const at::Tensor one = at::ones({1}, at::kShort);
    const at::Tensor two = at::ones({2}, at::kShort);
    const auto refused =
        HasSubstr("Gloo does not reduce int16. Convert it to int32.");
    EXPECT_THAT(failure_of([&] { c.world().all_reduce(two); }), refused);
    EXPECT_THAT(failure_of([&] { c.world().reduce_scatter(one, two); }),
                refused);
    c.world().barrier();
  });
}

TEST_P(AnyBackend, ADroppedSendArrives) {
  run_threads(2, GetParam(), [](Communicator& c) {
    if (c.rank() == 0) c.world().send(at::ones({300000}), 1);
    if (c.rank() == 1) {
      at::Tensor t = at::zeros({300000});
      c.world().recv(t, 0).wait();
      EXPECT_TRUE(at::equal(t, at::ones({300000})));
    }
  });
}

TEST_P(AnyBackend, AMessageThatNobodyAwaitsIsDoneAndCounted) {
  run_threads(2, GetParam(), [](Communicator& c) {
    Group& world = c.world();
    const at::Tensor t = at::full({8}, c.rank() + 1.0);
    const Work message = c.rank() == 0 ? world.send(t, 1) : world.recv(t, 0);
    const auto end = std::chrono::steady_clock::now() + kLong;
    while (!message.done() && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(message.done());
    EXPECT_TRUE(at::equal(t, at::ones({8})));
    ASSERT_EQ(world.stats().size(), 1U);
    EXPECT_EQ(world.stats()[0].calls, 1);
    // Whoever ended first would end the other's message.
    world.barrier();
  });
}

TEST_P(AnyBackend, TheFailureOfADroppedMessageSurfaces) {
  std::promise<void> given_up;
  auto waiting = given_up.get_future().share();
  run_threads(
      2, GetParam(),
      [&](Communicator& c) {
        if (c.rank() == 1) return waiting.wait();
        Group& world = c.world();
        world.recv(at::ones({4}), 1);
        const auto end = std::chrono::steady_clock::now() + kLong;
        const auto has_failed = [&] {
          return world.flight_record().find("failed after") !=
                 std::string::npos;
        };
        while (!has_failed() && std::chrono::steady_clock::now() < end) {
          std::this_thread::yield();
        }
        EXPECT_TRUE(has_failed());
        // What follows it fails at once.
        if (has_failed()) {
          EXPECT_THAT(failure_of([&] { world.barrier(); }),
                      AnyOf(HasSubstr("barrier #1 on group 'world'"),
                            HasSubstr("cannot go on")));
        }
        given_up.set_value();
      },
      std::chrono::seconds(1));
}

std::ptrdiff_t entries_of(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder),
                       std::filesystem::directory_iterator());
}

TEST_P(AnyBackend, LeavesNothingBehind) {
  const auto make_and_use = [&](Communicator& c) {
    Group* pair = c.make_group({0, 2}, "pair");
    at::Tensor t = at::ones({1000});
    c.world().all_reduce(t).wait();
    if (pair) pair->all_reduce(t).wait();
  };
  run_threads(3, GetParam(), make_and_use);  // what is opened once is open
  const auto files = entries_of("/proc/self/fd");
  const auto shared = entries_of("/dev/shm");
  const auto threads = entries_of("/proc/self/task");
  run_threads(3, GetParam(), make_and_use);
  testing::fork_ranks(3, GetParam(), die_in_all_reduce);
  failure_of_threads(GetParam(), 3, [&](Communicator& c) {
    make_and_use(c);
    TS_CHECK(c.rank() != 1, "boom");
    c.world().barrier();
  });
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
  EXPECT_EQ(entries_of("/dev/shm"), shared);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

}  // namespace
}  // namespace tessera::comm
