#include "tessera/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tessera/comm/nccl/nccl_backend.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"

namespace tessera::comm {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;

TEST(Communicator, OfOneRankNeedsNoStore) {
  for (const char* backend : {"auto", "shm", "gloo", "fake"}) {
    const auto communicator = make_communicator({.backend = backend});
    Group& world = communicator->world();
    at::Tensor t = at::arange(4.0);
    world.all_reduce(t, ReduceOp::kMean).wait();
    at::Tensor out = at::empty({4});
    world.all_gather(out, t).wait();
    world.reduce_scatter(out, t).wait();
    world.all_to_all(out, out.clone()).wait();
    world.broadcast(out, 0).wait();
    world.barrier();
    EXPECT_TRUE(at::equal(out, at::arange(4.0)));
    EXPECT_EQ(communicator->make_group({0}, "tp")->size(), 1);
    EXPECT_THAT(failure_of([&] {
                  world.all_to_all(at::empty({5}), at::empty({3}), {5}, {3});
                }),
                HasSubstr("sends itself 3 elements and expects 5"));
  }
}

TEST(Communicator, AutoIsShmOnOneHostAndGlooBetweenSeveral) {
  EXPECT_EQ(make_communicator({})->backend(), "shm");
  EXPECT_EQ(make_communicator({.local_world_size = 0})->backend(), "shm+gloo");
  EXPECT_EQ(make_communicator({.algorithm = "hierarchical"})->backend(), "shm");
  EXPECT_EQ(make_communicator({.backend = "gloo", .algorithm = "hierarchical"})
                ->backend(),
            "shm+gloo");
  EXPECT_EQ(make_communicator({.algorithm = "ring", .local_world_size = 0})
                ->backend(),
            "gloo");
}

TEST(Communicator, RefusesWhatCannotBe) {
  EXPECT_THAT(failure_of([] { make_communicator({.backend = "smh"}); }),
              HasSubstr("comm.backend=smh is not known"));
  EXPECT_THAT(failure_of([] { make_communicator({.algorithm = "rng"}); }),
              HasSubstr("comm.algorithm=rng is not known"));
  EXPECT_THAT(failure_of([] { make_communicator({.backend = "nccl"}); }),
              HasSubstr(nccl::is_built() ? "rank 0 computes on cpu"
                                         : "a LibTorch without CUDA"));
  EXPECT_THAT(
      failure_of([] { make_communicator({.rank = 2, .world_size = 2}); }),
      HasSubstr("rank 2 is not in a world of 2"));
  EXPECT_THAT(failure_of([] {
                make_communicator({.world_size = 2, .local_world_size = 2});
              }),
              HasSubstr("needs a store"));
  EXPECT_THAT(failure_of([] {
                make_communicator(
                    {.backend = "shm", .world_size = 4, .local_world_size = 2});
              }),
              HasSubstr("2 of 4 ranks are on this one"));
  EXPECT_THAT(failure_of([] {
                make_communicator({.backend = "fake",
                                   .rank = 2,
                                   .world_size = 3,
                                   .hosts = {"a", "b"}});
              }),
              HasSubstr("hosts: 2 are named, and 3 ranks have one each"));
}

// What one rank is refused for the others hear long before the time-out.
TEST(Communicator, WhyARankCannotBeMadeIsHeard) {
  CommunicatorOptions options{.backend = "shm",
                              .world_size = 2,
                              .local_world_size = 2,
                              .store = c10::make_intrusive<c10d::HashStore>()};
  std::vector<std::string> failures(2);
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&failures, rank, options]() mutable {
      options.rank = rank;
      if (rank == 1) options.algorithm = "rng";
      failures[rank] = failure_of([&] { make_communicator(options); });
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(failures, ::testing::Each(HasSubstr("algorithm=rng")));
}

TEST(Communicator, FakeActsAsAnyRankOfAnyWorld) {
  const auto communicator =
      make_communicator({.backend = "fake", .rank = 3000, .world_size = 4096});
  Group& world = communicator->world();
  EXPECT_EQ(world.rank(), 3000);
  at::Tensor t = at::full({2}, 0.5);
  world.all_reduce(t).wait();
  EXPECT_TRUE(at::equal(t, at::full({2}, 2048.0)));
  world.all_reduce(t, ReduceOp::kMean).wait();
  EXPECT_TRUE(at::equal(t, at::full({2}, 2048.0)));
  at::Tensor all = at::empty({8192});
  world.all_gather(all, t).wait();
  EXPECT_TRUE(at::equal(all, at::full({8192}, 2048.0)));
  Group* some = communicator->make_group({1, 3000}, "some");
  at::Tensor piece = at::empty({2});
  some->reduce_scatter(piece, at::arange(4.0)).wait();
  EXPECT_TRUE(at::equal(piece, at::full({2}, 4.0).add(at::arange(2.0).mul(2))));
  some->send(piece, 0).wait();
  some->recv(piece, 0).wait();
  EXPECT_EQ(communicator->make_group({1, 2}, "other"), nullptr);
}

TEST(Communicator, FakeWorksOnTheMetaDevice) {
  const auto communicator =
      make_communicator({.backend = "fake", .world_size = 8});
  const at::Tensor t = at::empty({8, 1000}, at::kMeta);
  Group& world = communicator->world();
  world.all_reduce(t).wait();
  world.all_gather(t, at::empty({1000}, at::kMeta)).wait();
  world.reduce_scatter(at::empty({1000}, at::kMeta), t).synchronize();
  world.all_to_all(t, t, {}, {}, Mode::kBlocking).synchronize();
}

TEST(Communicator, MakesTheSameGroupOnce) {
  run_threads(3, "shm", [](Communicator& communicator) {
    Group* pair = communicator.make_group({0, 2}, "pair");
    EXPECT_EQ(pair, communicator.make_group({0, 2}, "pair"));
    EXPECT_EQ(pair == nullptr, communicator.rank() == 1);
    Group* same_ranks = communicator.make_group({0, 2}, "other");
    EXPECT_TRUE(pair == nullptr || pair != same_ranks);
    EXPECT_EQ(communicator.groups().size(), pair ? 3U : 1U);
    if (pair) {
      EXPECT_EQ(pair->rank(), communicator.rank() / 2);
      EXPECT_EQ(pair->name(), "pair");
    }
    EXPECT_THROW(communicator.make_group({1, 0}, "descending"), Error);
    EXPECT_THROW(communicator.make_group({0, 3}, "outside"), Error);
  });
}

TEST(Communicator, ManyCanFollowEachOtherOverOneStore) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    run_threads(2, "shm", [](Communicator& communicator) {
      at::Tensor t = at::full({10}, communicator.rank() + 1.0);
      communicator.world().all_reduce(t).wait();
      EXPECT_TRUE(at::equal(t, at::full({10}, 3.0)));
    });
  }
}

TEST(RunThreads, SetsTheContextAndSharesTheCores) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  run_threads(2, "shm", [](Communicator& communicator) {
    EXPECT_EQ(rank_context().rank, communicator.rank());
    EXPECT_EQ(rank_context().world_size, 2);
    EXPECT_EQ(at::get_num_threads(), 2);
  });
  EXPECT_EQ(at::get_num_threads(), 4);
  at::set_num_threads(before);
}

TEST(Group, CountsAndRecordsWhatItDid) {
  run_threads(2, "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    at::Tensor t = at::ones({4, 8});
    world.all_reduce(t).wait();
    world.all_reduce(t, ReduceOp::kMax).wait();
    world.all_gather(at::empty({64}), t).wait();
    world.barrier();
    const auto stats = world.stats();
    ASSERT_EQ(stats.size(), 3U);
    EXPECT_EQ(stats[0].verb, "all_reduce");
    EXPECT_EQ(stats[0].calls, 2);
    EXPECT_EQ(stats[0].bytes, 2 * 128);
    EXPECT_GT(stats[0].seconds, 0.0);
    EXPECT_EQ(stats[1].bytes, 256);
    EXPECT_THAT(world.flight_record(),
                HasSubstr("all_reduce(max) #2 float32[4, 8] done in "));
    world.reset_stats();
    EXPECT_TRUE(world.stats().empty());
  });
}

// Receives that wait side by side are one wait.
TEST(Communicator, IsBusyNoLongerThanTimePasses) {
  run_threads(2, "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    Group* other = communicator.make_group({0, 1}, "other");
    const double before = communicator.seconds_busy();
    const auto start = std::chrono::steady_clock::now();
    constexpr auto kLate = std::chrono::milliseconds(50);
    if (communicator.rank() == 0) {
      std::this_thread::sleep_for(kLate);
      world.send(at::ones({8}), 1).wait();
      other->send(at::ones({8}), 1).wait();
    } else {
      Work first = world.recv(at::empty({8}), 0);
      Work second = other->recv(at::empty({8}), 0);
      first.wait();
      second.wait();
    }
    const double busy = communicator.seconds_busy() - before;
    const std::chrono::duration<double> passed =
        std::chrono::steady_clock::now() - start;
    EXPECT_LE(busy, passed.count());
    if (communicator.rank() == 0) return;
    EXPECT_GT(busy, 0.9 * std::chrono::duration<double>(kLate).count());
  });
}

// Of the same numbers, cut in whatever way and reduced from whatever place.
TEST(Shm, SumsHaveTheSameBitsHoweverTheyAreCut) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    run_threads(3, "shm", [dtype](Communicator& communicator) {
      constexpr int64_t kNumel = 1200007;
      std::vector<at::Tensor> inputs;
      for (int64_t r = 0; r < 3; ++r) {
        inputs.push_back(
            at::arange(kNumel, at::kDouble).mul(0.37 + r).sin().to(dtype));
      }
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor expected =
          (inputs[0].to(wide) + inputs[1].to(wide) + inputs[2].to(wide))
              .to(dtype);
      for (int64_t bucket : {kNumel, int64_t{1} << 18, int64_t{99991}}) {
        at::Tensor buffer = at::empty({kNumel + 3}, dtype);
        at::Tensor t = buffer.narrow(0, 3, kNumel);  // not at an even address
        t.copy_(inputs[communicator.rank()]);
        std::vector<Work> works;
        for (int64_t at = 0; at < kNumel; at += bucket) {
          works.push_back(communicator.world().all_reduce(
              t.narrow(0, at, std::min(bucket, kNumel - at))));
        }
        for (Work& work : works) work.wait();
        EXPECT_TRUE(at::equal(t, expected)) << dtype << ", bucket " << bucket;
      }
    });
  }
}

TEST(Shm, SendsThatCrossDoNotWaitForEachOther) {
  run_threads(3, "shm", [](Communicator& communicator) {
    Group& world = communicator.world();
    // Each waits for its send before it receives, around the ring.
    const int64_t next = (world.rank() + 1) % 3;
    const int64_t before = (world.rank() + 2) % 3;
    world.send(at::full({3000000}, world.rank()), next).wait();
    at::Tensor got = at::empty({3000000}, at::kLong);
    world.recv(got, before).wait();
    EXPECT_TRUE(at::equal(got, at::full({3000000}, before)));
  });
}

TEST(Shm, NaNsWinInMinAndMax) {
  run_threads(2, "shm", [](Communicator& communicator) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      at::Tensor t = communicator.rank() == 0 ? at::tensor({nan, 1.0})
                                              : at::tensor({1.0, nan});
      communicator.world().all_reduce(t, op).wait();
      EXPECT_TRUE(t.isnan().all().item<bool>());
    }
  });
}

}  // namespace
}  // namespace tessera::comm
