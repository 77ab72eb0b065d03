// What carries a group, who chooses, and what ranks hear when one fails.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/core/error.h"
#include "tests/support/failure_of.h"
#include "tests/support/layouts.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::on_hosts;
using testing::on_one_host;

TEST(Hierarchical, SaysWhatCarriesAGroup) {
  run_threads(on_hosts("aab", "auto"), [](Communicator& communicator) {
    EXPECT_EQ(communicator.backend(), "gloo");
  });
  CommunicatorOptions options = on_hosts("aab", "auto");
  options.backend = "auto";
  run_threads(options, [](Communicator& communicator) {
    EXPECT_EQ(communicator.backend(), "shm+gloo");
    EXPECT_EQ(communicator.world().backend(), "shm+gloo");
    Group* inside = communicator.make_group({0, 1}, "inside");
    if (inside) {
      EXPECT_EQ(inside->backend(), "shm");
    }
    Group* across = communicator.make_group({1, 2}, "across");
    if (across) {
      EXPECT_EQ(across->backend(), "shm+gloo");
    }
  });
  // All ranks of this test are on one host, whatever the launcher says.
  options.hosts.clear();
  run_threads(options, [](Communicator& communicator) {
    EXPECT_EQ(communicator.world().backend(), "shm");
  });
}

// A failure on one side of a host is heard on the other, long before the
// time-out.
TEST(Hierarchical, TellsBothSidesOfAFailure) {
  for (const char* hosts : {"aabb", "abab", "aab", "abb"}) {
    std::atomic<int> told = 0;
    const std::string said = failure_of([&] {
      run_threads(on_hosts(hosts), [&](Communicator& communicator) {
        Group& world = communicator.world();
        world.barrier();
        TS_CHECK(communicator.rank() != 1, "boom");
        at::Tensor t = at::ones({300000});
        EXPECT_THAT(failure_of([&] { world.all_reduce(t).wait(); }),
                    HasSubstr("all_reduce(sum) #2"));
        ++told;
      });
    });
    EXPECT_EQ(said, c10::str("[rank 1/", std::string(hosts).size(), "] boom"));
    EXPECT_EQ(told, std::string(hosts).size() - 1);
  }
}

TEST(Hierarchical, SurvivorsEndWhenARankIsKilled) {
  const auto ends =
      testing::fork_ranks(on_hosts("aabb"), [](Communicator& communicator) {
        Group& world = communicator.world();
        at::Tensor t = at::ones({300000});
        world.all_reduce(t).wait();
        if (communicator.rank() == 2) {
          world.all_reduce(t);
          raise(SIGKILL);
        }
        while (true) world.all_reduce(t).wait();
      });
  EXPECT_EQ(ends[2].signal, SIGKILL);
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(ends[rank].exit_code, 1);
    EXPECT_THAT(ends[rank].message,
                AllOf(HasSubstr("all_reduce(sum) #"), HasSubstr("shm+gloo")));
  }
  EXPECT_THAT(ends[3].message, AnyOf(HasSubstr("rank 2"), HasSubstr("peer")));
}

TEST(Selection, OfAnotherTableThanRankZeroIsRefused) {
  CommunicatorOptions options = on_one_host("gloo", 2, "ring");
  const std::string said = failure_of([&] {
    run_threads(2, "shm", [&](Communicator& outer) {
      static const auto store = c10::make_intrusive<c10d::HashStore>();
      CommunicatorOptions own = options;
      own.rank = outer.rank();
      own.store = store;
      if (outer.rank() == 1) own.algorithm = "tree";
      make_communicator(own);
    });
  });
  EXPECT_THAT(said, AnyOf(HasSubstr("comm.algorithm is tree with no table on "
                                    "rank 1, ring with no table on rank 0"),
                          HasSubstr("failed")));
}

// A message that is awaited meanwhile is none of the algorithms' own.
TEST(Selection, LeavesEveryTagToMessages) {
  run_threads(on_one_host("gloo", 2, "ring"), [](Communicator& communicator) {
    Group& world = communicator.world();
    const int64_t peer = 1 - communicator.rank();
    const std::vector<int64_t> tags = {32766, 32767, 32768};
    std::vector<at::Tensor> got;
    std::vector<Work> works;
    for (const int64_t tag : tags) {
      got.push_back(at::zeros({1}, at::kLong));
      works.push_back(world.recv(got.back(), peer, tag));
    }
    at::Tensor sum = at::ones({300});
    world.all_reduce(sum).wait();
    EXPECT_TRUE(at::equal(sum, at::full({300}, 2.0)));
    for (const int64_t tag : tags) {
      world.send(at::full({1}, tag, at::kLong), peer, tag).wait();
    }
    for (size_t i = 0; i < tags.size(); ++i) {
      works[i].wait();
      EXPECT_EQ(got[i].item<int64_t>(), tags[i]);
    }
    EXPECT_THAT(failure_of([&] { world.send(at::ones({1}), peer, INT32_MAX); }),
                HasSubstr("is not below 2147483647"));
    world.barrier();
  });
}

}  // namespace
}  // namespace tessera::comm
