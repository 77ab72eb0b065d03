// Ranks that call other collectives than their peers, over a backend that takes
// them as they come.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tests/support/failure_of.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using testing::failure_of_threads;
using ::testing::HasSubstr;

// Without the debug mode, what Gloo takes as it comes: the calls go well, with
// numbers that are wrong.
struct Misorder {
  std::string name;
  std::function<void(Group&)> right, wrong;
  std::string first, second;  // what they are told to have called
  friend void PrintTo(const Misorder& m, std::ostream* out) { *out << m.name; }
};

class Misordered : public ::testing::TestWithParam<Misorder> {};

TEST_P(Misordered, IsNamedSoonAfter) {
  const Misorder& what = GetParam();
  int calls = 0;
  const std::string said = failure_of_threads("gloo", 3, [&](Communicator& c) {
    Group& world = c.world();
    for (int i = 0; i < 140; ++i) world.barrier();
    (c.rank() == 1 ? what.wrong : what.right)(world);
    for (int i = 0; i < 300; ++i) {
      if (c.rank() == 0) ++calls;
      world.barrier();
    }
  });
  EXPECT_LT(calls, 192);
  EXPECT_THAT(said,
              AllOf(HasSubstr("the ranks disagree: their first 256 collectives "
                              "on this group are not the same"),
                    HasSubstr("Verdict: the ranks differ: ranks 0, 2 call " +
                              what.first + "; rank 1 calls " + what.second)));
}

void sum(Group& group, at::Tensor t) { group.all_reduce(std::move(t)).wait(); }

const std::vector<Misorder> kMisorders = {
    {"Reductions", [](Group& g) { sum(g, at::ones({4})); },
     [](Group& g) { g.all_reduce(at::ones({4}), ReduceOp::kMax).wait(); },
     "all_reduce(sum) #141 float32[4]", "all_reduce(max) #141 float32[4]"},
    {"DtypesOfOneWidth", [](Group& g) { sum(g, at::ones({4})); },
     [](Group& g) { sum(g, at::ones({4}, at::kInt)); },
     "all_reduce(sum) #141 float32[4]", "all_reduce(sum) #141 int32[4]"},
    {"SwappedCalls",
     [](Group& g) {
       sum(g, at::ones({4}));
       g.all_reduce(at::ones({4}), ReduceOp::kMin).wait();
     },
     [](Group& g) {
       g.all_reduce(at::ones({4}), ReduceOp::kMin).wait();
       sum(g, at::ones({4}));
     },
     "all_reduce(sum) #141 float32[4]", "all_reduce(min) #141 float32[4]"},
    {"DtypesOfExchanges",
     [](Group& g) { g.all_to_all(at::ones({3}), at::ones({3})).wait(); },
     [](Group& g) {
       g.all_to_all(at::ones({3}, at::kInt), at::ones({3}, at::kInt)).wait();
     },
     "all_to_all #141 float32[3]", "all_to_all #141 int32[3]"}};

INSTANTIATE_TEST_SUITE_P(What, Misordered, ::testing::ValuesIn(kMisorders),
                         [](const auto& info) { return info.param.name; });

// At once where that is asked for: nothing has to follow.
TEST_P(Misordered, IsNamedAtOnceWhereAsked) {
  const Misorder& what = GetParam();
  const std::string said = failure_of_threads("gloo", 3, [&](Communicator& c) {
    c.make_group({0, 1, 2}, "another");
    for (int i = 0; i < 140; ++i) c.world().barrier();
    compare_calls(c);
    for (int i = 0; i < 5; ++i) c.world().barrier();
    (c.rank() == 1 ? what.wrong : what.right)(c.world());
    compare_calls(c);
    ADD_FAILURE() << "nothing was found";
  });
  EXPECT_THAT(said,
              AllOf(HasSubstr("collectives on this group are not the same"),
                    HasSubstr("Verdict: the ranks differ: ranks 0, 2 call ")));
}

// Shapes of as many elements, exchanges of other sizes, what a rank is refused
// and repeats, messages between some: all of this is in order.
TEST(Histories, OfWhatIsInOrderAreTheSame) {
  run_threads(3, "gloo", [](Communicator& c) {
    Group& world = c.world();
    for (int i = 0; i < 50; ++i) {
      at::Tensor six = c.rank() == 0 ? at::ones({6}) : at::ones({2, 3});
      world.all_reduce(six).wait();
      const int64_t mine = c.rank() + 1;  // to each; from rank r come r + 1
      world
          .all_to_all(at::empty({6}), at::ones({3 * mine}), {1, 2, 3},
                      {mine, mine, mine})
          .wait();
      if (c.rank() == 2) {
        EXPECT_NE(
            failure_of([&] { world.all_reduce(at::ones({1}, at::kShort)); }),
            "");
      }
      if (c.rank() == 0) world.send(six, 1).wait();
      if (c.rank() == 1) world.recv(six, 0).wait();
      world.broadcast(six, 2).wait();
    }
  });
}

// What one rank is refused has no number: the calls of all have the same ones.
TEST(Histories, TheVerdictHoldsAfterARefusal) {
  const std::string said = failure_of_threads("gloo", 2, [](Communicator& c) {
    Group& world = c.world();
    world.barrier();
    if (c.rank() == 1) {
      EXPECT_NE(failure_of([&] { sum(world, at::ones({1}, at::kShort)); }), "");
    }
    sum(world, at::ones({3}));
    world.all_reduce(at::ones({4}),
                     c.rank() == 1 ? ReduceOp::kMax : ReduceOp::kSum);
    for (int i = 0; i < 200; ++i) world.barrier();
  });
  EXPECT_THAT(said, HasSubstr("rank 0 calls all_reduce(sum) #3 float32[4]; "
                              "rank 1 calls all_reduce(max) #3 float32[4]"));
}

// Its last call is the 128th, after which they compare; the others come later.
TEST(Histories, ARankMayLeaveAfterAnyCall) {
  run_threads(3, "gloo", [](Communicator& c) {
    Group* own = c.make_group({0, 1, 2}, "own");
    at::Tensor t = at::ones({300000});
    if (c.rank() > 0) usleep(50'000);
    for (int i = 0; i < 128; ++i) own->broadcast(at::ones({4}), 0).wait();
    if (c.rank() == 0) return;
    for (int i = 0; i < 10; ++i) {
      if (c.rank() == 1) own->send(t, 2).wait();
      if (c.rank() == 2) own->recv(t, 1).wait();
    }
  });
}

}  // namespace
}  // namespace tessera::comm
