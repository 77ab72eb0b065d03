#include "tessera/parallel/data_parallel/ring.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace tessera::parallel::data_parallel {
namespace {

// What each rank holds of each chunk, written as a sum: "(a0+a1)+a2".
using Holdings = std::map<std::pair<int64_t, int64_t>, std::string>;

Holdings own_values(int64_t num_ranks) {
  Holdings held;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t chunk = 0; chunk < num_ranks; ++chunk) {
      held[{rank, chunk}] =
          std::string(1, static_cast<char>('a' + chunk)) + std::to_string(rank);
    }
  }
  return held;
}

bool is_sum(const std::string& value) {
  return value.find('+') != std::string::npos;
}

// All moves of `step` at once: what is sent is what was held before it.
Holdings after_step(const Holdings& before, int64_t num_ranks, int64_t step) {
  Holdings after = before;
  for (const RingMove& move : ring_all_reduce(num_ranks)) {
    if (move.step != step) continue;
    const std::string& sent = before.at({move.from, move.chunk});
    std::string& held = after[{move.to, move.chunk}];
    const std::string shown = is_sum(sent) ? "(" + sent + ")" : sent;
    held = move.adds ? shown + "+" + held : sent;
  }
  return after;
}

// The example's table: ranks 0 -> 1 -> 2 -> 0, chunks a, b, c.
TEST(RingAllReduce, OfThreeRanksMoveByMove) {
  constexpr int64_t a = 0, b = 1, c = 2;
  const std::vector<RingMove> expected = {
      {0, 0, 1, a, true},  {0, 1, 2, b, true},  {0, 2, 0, c, true},
      {1, 0, 1, c, true},  {1, 1, 2, a, true},  {1, 2, 0, b, true},
      {2, 0, 1, b, false}, {2, 1, 2, c, false}, {2, 2, 0, a, false},
      {3, 0, 1, a, false}, {3, 1, 2, b, false}, {3, 2, 0, c, false},
  };
  EXPECT_EQ(ring_all_reduce(3), expected);

  Holdings held = after_step(own_values(3), 3, 0);
  EXPECT_EQ((held[{1, a}]), "a0+a1");
  EXPECT_EQ((held[{2, b}]), "b1+b2");
  EXPECT_EQ((held[{0, c}]), "c2+c0");
  held = after_step(held, 3, 1);
  EXPECT_EQ((held[{2, a}]), "(a0+a1)+a2");
  EXPECT_EQ((held[{0, b}]), "(b1+b2)+b0");
  EXPECT_EQ((held[{1, c}]), "(c2+c0)+c1");
  held = after_step(after_step(held, 3, 2), 3, 3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ((held[{rank, a}]), "(a0+a1)+a2");
    EXPECT_EQ((held[{rank, b}]), "(b1+b2)+b0");
    EXPECT_EQ((held[{rank, c}]), "(c2+c0)+c1");
  }
}

// 2 (N-1) steps of one chunk of S/N out of and into each rank, and at the end
// every rank holds, of every chunk, one sum of all ranks' values.
TEST(RingAllReduce, OfAnyNumberOfRanks) {
  EXPECT_TRUE(ring_all_reduce(1).empty());
  for (int64_t ranks = 2; ranks <= 9; ++ranks) {
    std::map<int64_t, int64_t> sent, received;
    for (const RingMove& move : ring_all_reduce(ranks)) {
      ++sent[move.from];
      ++received[move.to];
      EXPECT_EQ(move.to, (move.from + 1) % ranks);
    }
    Holdings held = own_values(ranks);
    for (int64_t step = 0; step < 2 * (ranks - 1); ++step) {
      held = after_step(held, ranks, step);
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(sent[rank], 2 * (ranks - 1));
      EXPECT_EQ(received[rank], 2 * (ranks - 1));
      for (int64_t chunk = 0; chunk < ranks; ++chunk) {
        const std::string& sum = held[{rank, chunk}];
        EXPECT_EQ(sum, (held[{0, chunk}]));
        for (int64_t other = 0; other < ranks; ++other) {
          EXPECT_NE(sum.find(std::to_string(other)), std::string::npos);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::parallel::data_parallel
