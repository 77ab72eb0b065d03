#include "tessera/train/reruns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Each takes the next one's samples the third time, and those of the one behind
// it the fifth; hashes are those of their samples, 1 for rank 0's.
std::vector<Rerun> exchanged(int64_t ranks) {
  std::vector<Rerun> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t next = (rank + 1) % ranks, after = (rank + 2) % ranks;
    const auto own = static_cast<uint64_t>(rank + 1);
    const auto of_next = static_cast<uint64_t>(next + 1);
    all.push_back({.rank = rank,
                   .next = next,
                   .after = after,
                   .first = own,
                   .second = own,
                   .third = of_next,
                   .fourth = of_next,
                   .fifth = static_cast<uint64_t>(after + 1)});
  }
  return all;
}

// A rank that computes otherwise always alike, of these samples.
void spoil_own(Rerun& of) { of.first = of.second = 90; }
void spoil_next(Rerun& of) { of.third = of.fourth = 91; }

TEST(Reruns, OfWhomAllAgreeNothingIsSaid) {
  for (const int64_t ranks : {1, 2, 5}) {
    const auto verdict = verdict_on(exchanged(ranks));
    EXPECT_FALSE(verdict.differs);
    EXPECT_THAT(verdict.transient, IsEmpty());
    EXPECT_THAT(verdict.persistent, IsEmpty());
  }
}

TEST(Reruns, WhatIsOtherwiseOnceIsTransient) {
  for (uint64_t Rerun::* const time :
       {&Rerun::first, &Rerun::second, &Rerun::third}) {
    for (const int64_t ranks : {1, 2, 3}) {
      auto all = exchanged(ranks);
      all.back().*time = 99;
      const auto verdict = verdict_on(all);
      EXPECT_TRUE(verdict.differs);
      EXPECT_THAT(verdict.transient, ElementsAre(ranks - 1));
      EXPECT_THAT(verdict.persistent, IsEmpty());
    }
  }
}

TEST(Reruns, OfTwoThatRepeatThemselvesWhoIsWrongIsNotKnown) {
  auto all = exchanged(2);
  spoil_own(all[1]);
  spoil_next(all[1]);
  all[1].fifth = 90;  // its own again
  EXPECT_THAT(verdict_on(all).persistent, ElementsAre(0, 1));
}

TEST(Reruns, OfMoreTheThirdSaysIt) {
  for (const int64_t ranks : {3, 4}) {
    for (const int64_t wrong : {0, 2}) {
      for (const auto& spoils : {spoil_own, spoil_next}) {
        auto all = exchanged(ranks);
        spoils(all[wrong]);
        const auto verdict = verdict_on(all);
        EXPECT_THAT(verdict.persistent, ElementsAre(wrong));
        EXPECT_THAT(verdict.transient, IsEmpty());
      }
    }
  }
}

TEST(Reruns, WhoIsOtherwiseEachTime) {
  for (const int64_t ranks : {1, 3}) {
    auto all = exchanged(ranks);
    all[0].first = 90;
    all[0].second = 91;
    all[0].third = 92;
    all[0].fourth = 93;
    EXPECT_THAT(verdict_on(all).persistent, ElementsAre(0));
  }
}

// Those of its replica, which get what it computed.
TEST(Reruns, TwoReplicasOfTwoRanks) {
  std::vector<Rerun> all = {{0, 2, 0, 1, 1, 3, 3, 1},
                            {1, 3, 1, 2, 2, 4, 4, 2},
                            {2, 0, 2, 3, 99, 1, 1, 3},
                            {3, 1, 3, 4, 98, 2, 2, 4}};
  const auto verdict = verdict_on(all);
  EXPECT_THAT(verdict.transient, ElementsAre(2, 3));
  EXPECT_THAT(verdict.persistent, IsEmpty());
}

}  // namespace
}  // namespace tessera::train
