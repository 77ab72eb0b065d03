#include "tessera/comm/shm/messages.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/ranks.h"

namespace tessera::comm::shm {
namespace {

// Below, about and far above what a channel holds.
const std::vector<int64_t> kNumels = {100, 8000, 12000, 2 << 20};

// Without LibTorch's loops: its first use by two threads at once, after a fork,
// fails ("Invalid thread pool").
at::Tensor message_of(int64_t rank, int64_t numel) {
  const at::Tensor message = at::empty({numel}, at::kLong);
  auto* data = message.data_ptr<int64_t>();
  std::iota(data, data + numel, 10 * rank);
  return message;
}

at::Tensor place_for(int64_t numel) { return at::empty({numel}, at::kLong); }

void expect_message(const at::Tensor& got, int64_t from) {
  const at::Tensor expected = message_of(from, got.numel());
  const auto* data = got.const_data_ptr<int64_t>();
  EXPECT_TRUE(
      std::equal(data, data + got.numel(), expected.const_data_ptr<int64_t>()))
      << got.numel() << " elements";
}

class MessagesTest : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int64_t ranks, const testing::RankBody& body) {
    if (GetParam()) {
      testing::run_processes(ranks, "shm", body);
    } else {
      run_threads(ranks, "shm", body);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(On, MessagesTest, ::testing::Values(false, true),
                         [](const auto& info) {
                           return info.param ? "processes" : "threads";
                         });

TEST_P(MessagesTest, BlockingSendsThatCrossNeverBlock) {
  run(3, [](Communicator& ranks) {
    Group& world = ranks.world();
    for (const int64_t numel : kNumels) {
      for (int64_t peer = 0; peer < 3; ++peer) {
        if (peer == world.rank()) continue;
        world.send(message_of(world.rank(), numel), peer).wait();
      }
      for (int64_t peer = 0; peer < 3; ++peer) {
        if (peer == world.rank()) continue;
        at::Tensor got = place_for(numel);
        world.recv(got, peer).wait();
        expect_message(got, peer);
      }
    }
  });
}

TEST_P(MessagesTest, ArriveWhileTheReceiverIsElsewhere) {
  run(2, [](Communicator& ranks) {
    Group& world = ranks.world();
    for (const int64_t numel : kNumels) {
      if (world.rank() == 0) {
        world.send(message_of(0, numel), 1).wait();
        world.barrier();
      } else {
        at::Tensor got = place_for(numel);
        Work receive = world.recv(got, 0);
        world.barrier();  // no message moves on this thread
        receive.wait();
        expect_message(got, 0);
      }
    }
  });
}

TEST_P(MessagesTest, AreThereAlthoughTheSenderLetGo) {
  run(2, [](Communicator& ranks) {
    Group& world = ranks.world();
    for (const int64_t numel : kNumels) {
      if (world.rank() == 0) {
        world.send(message_of(0, numel), 1);
        continue;
      }
      at::Tensor got = place_for(numel);
      world.recv(got, 0).wait();
      expect_message(got, 0);
    }
  });
}

TEST_P(MessagesTest, ThreadsOfARankWaitForTheirOwn) {
  run(2, [](Communicator& ranks) {
    Group& world = ranks.world();
    const int64_t peer = 1 - world.rank();
    std::vector<std::jthread> threads;
    for (int64_t tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 30; ++i) {
          const int64_t numel = kNumels[(i + tag) % 3];
          Work sent = world.send(message_of(tag, numel), peer, tag);
          at::Tensor got = place_for(numel);
          world.recv(got, peer, tag).wait();
          expect_message(got, tag);
          sent.wait();
        }
      });
    }
  });
}

TEST_P(MessagesTest, OfAnySizeComeFromAnyRank) {
  run(3, [](Communicator& ranks) {
    Group& world = ranks.world();
    for (const int64_t numel : {0, 100, 20000}) {
      if (world.rank() != 0) {
        world.send(message_of(world.rank(), numel), 0).wait();
        continue;
      }
      for (int64_t peer = 2; peer > 0; --peer) {
        const at::Tensor got = place_for(numel);
        world.recv(got, peer).wait();
        expect_message(got, peer);
      }
    }
  });
}

// The bytes left behind in the channel look like envelopes.
TEST_P(MessagesTest, AMismatchFailsAllThatFollowsAndNothingElse) {
  const auto body = [](Communicator& ranks) {
    Group& world = ranks.world();
    const at::Tensor twos = at::full({100}, 2, at::kLong);
    const at::Tensor place = place_for(50);
    const auto both = [&] {
      if (world.rank() == 0) {
        world.send(twos, 1).wait();
        world.recv(place, 1).wait();
      } else {
        world.recv(place, 0).wait();
      }
    };
    EXPECT_ANY_THROW(both());
    EXPECT_ANY_THROW(both());
  };
  run(2, body);
}

// Where the system lets nobody read another process all goes by the channels.
TEST(Messages, NeedNoAccessToTheirPeers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank = [&](int64_t rank) {
    Segment segment(Rendezvous(store, "g"),
                    {.group = "test",
                     .rank = rank,
                     .ranks = {0, 1},
                     .timeout = std::chrono::seconds(20)});
    const auto messages = std::make_shared<Messages>(
        segment, [](const std::string& why) { ADD_FAILURE() << why; },
        Mailbox::kNeverLend);
    const auto transfer = [&](const at::Tensor& tensor, bool sends) {
      auto work = c10::make_intrusive<PendingWork>(
          static_cast<int>(rank), c10d::OpType::SEND,
          std::vector<at::Tensor>{tensor}, messages);
      messages->submit(
          {.work = work, .tensor = tensor, .sends = sends, .peer = 1 - rank});
      work->wait();
    };
    for (const int64_t numel : kNumels) {
      transfer(message_of(rank, numel), true);
      const at::Tensor got = place_for(numel);
      transfer(got, false);
      expect_message(got, 1 - rank);
    }
    messages->close();
  };
  std::jthread first(rank, 0);
  rank(1);
}

}  // namespace
}  // namespace tessera::comm::shm
