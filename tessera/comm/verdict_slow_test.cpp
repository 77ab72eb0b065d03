// One rank of three is killed, stopped, late, or calls something else: every
// other rank ends, and says which rank it was and what it did.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr auto kTimeout = std::chrono::seconds(1);
constexpr int kGuilty = 2;

// Ends this process by force when it cannot end by itself.
void end_later(std::chrono::seconds after) {
  const pid_t rank = getpid();
  if (fork() != 0) return;
  std::this_thread::sleep_for(after);
  kill(rank, SIGKILL);
  _exit(0);
}

[[gnu::noinline]] void computes_for(std::chrono::seconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  volatile double sum = 0;
  while (true) {
    for (int i = 0; i < 1'000'000; ++i) sum = sum + i;
    if (std::chrono::steady_clock::now() > end) break;
  }
}

struct Fault {
  std::string name;
  // What the guilty rank does instead of its second collective.
  std::function<void(Communicator&)> instead;
  // One of these is in what the others say, who all name the rank.
  std::vector<std::string> said;
};

std::vector<Fault> faults() {
  return {
      {"killed",
       [](Communicator&) { raise(SIGKILL); },
       {"rank 2 (pid ", "rank 2 has died"}},
      {"stopped",
       [](Communicator&) {
         end_later(std::chrono::seconds(3));
         raise(SIGSTOP);
       },
       {"rank 2 is stopped"}},
      {"late",
       [](Communicator& ranks) {
         std::this_thread::sleep_for(std::chrono::seconds(3));
         at::Tensor t = at::ones({4});
         ranks.world().all_reduce(t).wait();
       },
       {"rank 2 has not come to it: it last did"}},
      {"busy_elsewhere",
       [](Communicator&) { computes_for(std::chrono::seconds(3)); },
       {"it stands in tessera::comm::computes_for, called by "}},
      {"another_shape",
       [](Communicator& ranks) {
         at::Tensor t = at::ones({6});
         ranks.world().all_reduce(t).wait();
       },
       // Gloo itself gives the others a result, and lets one rank fail.
       {"rank 2 calls all_reduce(sum) #2",
        "it failed in all_reduce(sum) #2 float32[6]"}},
      {"another_operation",
       [](Communicator& ranks) { ranks.world().barrier(); },
       {"rank 2 calls barrier #2"}},
      {"one_skipped", [](Communicator&) {}, {"rank 2 calls barrier #2"}},
  };
}

class FaultOnBackend
    : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {};
INSTANTIATE_TEST_SUITE_P(Verdict, FaultOnBackend,
                         ::testing::Combine(::testing::Values("shm", "gloo"),
                                            ::testing::Range<size_t>(0, 7)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  faults()[std::get<1>(info.param)].name;
                         });

TEST_P(FaultOnBackend, NamesTheRank) {
  const auto& [backend, index] = GetParam();
  const Fault fault = faults()[index];
  const auto ends = testing::fork_ranks(
      3, backend,
      [&](Communicator& ranks) {
        at::Tensor t = at::ones({4});
        ranks.world().all_reduce(t).wait();
        if (ranks.rank() == kGuilty) {
          fault.instead(ranks);
        } else {
          ranks.world().all_reduce(t).wait();
        }
        ranks.world().barrier();
      },
      kTimeout);
  std::string verdicts;
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].exit_code, 1) << "rank " << rank;
    EXPECT_THAT(ends[rank].message, HasSubstr("rank 2")) << "rank " << rank;
    verdicts += ends[rank].message + "\n";
  }
  // The first to fail judges; on shm the other one hears of it at once.
  EXPECT_THAT(verdicts, AnyOf(HasSubstr(fault.said.front()),
                              HasSubstr(fault.said.back())));
  EXPECT_NE(ends[kGuilty].exit_code, 0);
}

class MessagesOn : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Verdict, MessagesOn, ::testing::Values("shm", "gloo"));

// As in a pipeline: rank 0 waits for rank 1, which waits for the stopped one.
TEST_P(MessagesOn, NameTheStoppedRankAndNotTheNeighbour) {
  const auto ends = testing::fork_ranks(
      3, GetParam(),
      [](Communicator& ranks) {
        at::Tensor t = at::ones({4});
        if (ranks.rank() == kGuilty) {
          end_later(std::chrono::seconds(3));
          raise(SIGSTOP);
        }
        ranks.world().recv(t, ranks.rank() + 1).wait();
      },
      kTimeout);
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].exit_code, 1) << "rank " << rank;
    EXPECT_THAT(ends[rank].message, HasSubstr("rank 2 is stopped"))
        << "rank " << rank;
  }
}

class TwoAxesOn : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Verdict, TwoAxesOn, ::testing::Values("shm", "gloo"));

// Of ranks {0, 1} and {2, 3} along tp, {0, 2} and {1, 3} along dp: rank 0 waits
// for rank 1, which waits for the stopped one, which rank 0 shares no group
// with.
TEST_P(TwoAxesOn, NameTheStoppedRankOfAnotherGroup) {
  const auto ends = testing::fork_ranks(
      4, GetParam(),
      [](Communicator& ranks) {
        const int64_t rank = ranks.rank();
        const int64_t row = rank / 2 * 2;
        Group& tp = *ranks.make_group({row, row + 1}, "tp");
        Group& dp = *ranks.make_group({rank % 2, rank % 2 + 2}, "dp");
        at::Tensor t = at::ones({4});
        ranks.world().all_reduce(t).wait();
        if (rank == 3) {
          end_later(std::chrono::seconds(3));
          raise(SIGSTOP);
        }
        (rank == 0 ? tp : dp).all_reduce(t).wait();
        ranks.world().barrier();
      },
      kTimeout);
  EXPECT_THAT(ends[0].message, HasSubstr("rank 3 is stopped"));
}

}  // namespace
}  // namespace tessera::comm
