#include "tessera/train/reruns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Hashes are those of samples, 1 for rank 0's.
std::vector<Rerun> exchanged(int64_t ranks) {
  std::vector<Rerun> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t next = (rank + 1) % ranks, after = (rank + 2) % ranks;
    const auto own = static_cast<uint64_t>(rank + 1);
    const auto of_next = static_cast<uint64_t>(next + 1);
    all.push_back({.rank = rank,
                   .next = next,
                   .after = after,
                   .own = own,
                   .own_again = own,
                   .of_next = of_next,
                   .of_next_again = of_next,
                   .of_after = static_cast<uint64_t>(after + 1)});
  }
  return all;
}

// A rank that computes otherwise always alike, of these samples.
void spoil_own(Rerun& of) { of.own = of.own_again = 90; }
void spoil_next(Rerun& of) { of.of_next = of.of_next_again = 91; }

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
       {&Rerun::own, &Rerun::own_again, &Rerun::of_next}) {
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
  all[1].of_after = 90;  // its own again
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
    all[0].own = 90;
    all[0].own_again = 91;
    all[0].of_next = 92;
    all[0].of_next_again = 93;
    EXPECT_THAT(verdict_on(all).persistent, ElementsAre(0));
  }
}

TEST(Reruns, OneOtherwiseOnceBesideOneThatAlwaysIs) {
  auto all = exchanged(3);
  all[0] = {.rank = 0,
            .next = 1,
            .after = 2,
            .own = 90,
            .own_again = 90,
            .of_next = 91,
            .of_next_again = 91,
            .of_after = 92};
  all[1].own = 99;
  const auto verdict = verdict_on(all);
  EXPECT_THAT(verdict.transient, ElementsAre(1));
  EXPECT_THAT(verdict.persistent, ElementsAre(0));
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
