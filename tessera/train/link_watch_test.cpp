#include "tessera/train/link_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "tessera/comm/link.h"
#include "tessera/monitor/links.h"
#include "tessera/train/median.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using Speeds = std::map<std::pair<int64_t, int64_t>, double>;  // of hosts

// Hosts "a", "b", ... of `per_host` ranks each; what leaves a host shares its
// speed.
struct Network {
  int64_t num_hosts, per_host;
  LinkWatch watch{hosts()};
  int64_t round = 0;

  std::vector<std::string> hosts() const {
    std::vector<std::string> of_ranks;
    for (int64_t rank = 0; rank < num_hosts * per_host; ++rank) {
      of_ranks.push_back(
          std::string(1, static_cast<char>('a' + rank / per_host)) + "/boot");
    }
    return of_ranks;
  }
  // A round of the tournament. Lines that are not told of have 1 GB/s.
  std::vector<News> measure(const Speeds& speeds) {
    std::vector<monitor::LinkSpeed> links;
    std::map<int64_t, int64_t> leaving;
    const int64_t size = num_hosts * per_host;
    for (int64_t rank = 0; rank < size; ++rank) {
      const auto peer = comm::link_peer(rank, size, round);
      if (!peer || *peer < rank) continue;
      links.push_back({.from = rank, .to = *peer});
      if (rank / per_host == *peer / per_host) continue;
      ++leaving[rank / per_host];
      ++leaving[*peer / per_host];
    }
    for (auto& link : links) {
      const auto one = link.from / per_host, other = link.to / per_host;
      const auto speed = speeds.find({one, other});
      const double line = speed == speeds.end() ? 1 : speed->second;
      link.gbps =
          one == other ? 0.01 : line / std::max(leaving[one], leaving[other]);
    }
    watch.add(links);
    if (!watch.wants_again()) ++round;
    return watch.take_news();
  }
  std::vector<News> measure(const Speeds& speeds, int64_t times) {
    std::vector<News> all;
    for (int64_t i = 0; i < times; ++i) {
      for (auto& news : measure(speeds)) all.push_back(std::move(news));
    }
    return all;
  }
};

TEST(Links, ALineIsHeldAgainstTheOthers) {
  Network network{3, 1};
  const auto news = network.measure({{{1, 2}, 0.1}}, 8);
  ASSERT_EQ(news.size(), 1);
  EXPECT_TRUE(news[0].is_bad);
  EXPECT_THAT(news[0].text, HasSubstr("between rank 1 (on b) and rank 2 (on c) "
                                      "go 0.1 GB/s"));
  EXPECT_THAT(news[0].text, HasSubstr("usual here are 1: 10 times as much"));
}

TEST(Links, AHostWhoseLinesAreAllSlowIsFound) {
  for (int64_t per_host : {1, 2, 4}) {
    Network network{4, per_host};
    const auto news =
        network.measure({{{0, 3}, 0.1}, {{1, 3}, 0.1}, {{2, 3}, 0.1}}, 64);
    std::string texts;
    for (const auto& each : news) texts += each.text + "\n";
    ASSERT_EQ(news.size(), 3) << per_host << "\n" << texts;
    for (const auto& line : news) EXPECT_THAT(line.text, HasSubstr("(on d)"));
  }
}

TEST(Links, TheOnlyLineIsHeldAgainstItsPast) {
  Network network{2, 1};
  EXPECT_TRUE(network.measure({}, 3).empty());
  const Speeds slow = {{{0, 1}, 0.2}};
  EXPECT_TRUE(network.measure(slow, LinkWatch::kInARow - 1).empty());
  EXPECT_TRUE(network.watch.wants_again());
  EXPECT_EQ(network.measure(slow).size(), 1);
  EXPECT_FALSE(network.watch.wants_again());
  EXPECT_TRUE(network.measure(slow, 100).empty());  // told once
  const auto again = network.measure({});
  ASSERT_EQ(again.size(), 1);
  EXPECT_FALSE(again[0].is_bad);
}

TEST(Links, OneSlowMeasurementIsNoNews) {
  Network network{2, 4};
  for (int64_t i = 0; i < 50; ++i) {
    const double speed = i % 3 == 2 ? 0.01 : 1;
    EXPECT_TRUE(network.measure({{{0, 1}, speed}}).empty()) << i;
  }
}

TEST(Links, WhatSharesALineIsNotSlow) {
  for (int64_t per_host : {1, 3, 8}) {
    Network network{3, per_host};
    EXPECT_TRUE(network.measure({}, 100).empty()) << per_host;
  }
}

TEST(Links, WithinAHostNothingIsJudged) {
  Network network{1, 4};
  EXPECT_TRUE(network.measure({}, 100).empty());
}

TEST(Links, AreToldByRanksWithinAHostAndByHostsBetween) {
  Network network{3, 2};
  network.measure({{{0, 2}, 0.5}}, 10);
  const auto links = network.watch.links();
  std::vector<std::tuple<int64_t, int64_t, double>> told;
  for (const auto& link : links) {
    told.emplace_back(link.from, link.to, link.gbps);
  }
  // Two share what leaves a host.
  const decltype(told) expected = {{0, 1, 0.01}, {2, 3, 0.01}, {4, 5, 0.01},
                                   {0, 4, 0.25}, {1, 3, 0.5},  {2, 5, 0.5}};
  EXPECT_EQ(told, expected);
}

TEST(Links, OfManyLinesTheSlowestAndTheMedianAreTold) {
  Network network{24, 1};
  network.measure({{{20, 23}, 0.5}}, 23);
  const auto links = network.watch.links();
  ASSERT_EQ(links.size(), monitor::kLinksShown + 1);
  EXPECT_EQ(links.front().from, 20);
  EXPECT_EQ(links.front().to, 23);
  EXPECT_EQ(links.back().gbps, 1);
}

TEST(Links, TheMedianOfAllButOneIsThatOfTheOthers) {
  for (const auto& all : std::vector<std::vector<double>>{
           {1, 2}, {2, 1, 3}, {4, 1, 1, 2}, {5, 3, 3, 3, 1}}) {
    const MedianOfOthers median(all);
    for (size_t i = 0; i < all.size(); ++i) {
      auto others = all;
      others.erase(others.begin() + static_cast<int64_t>(i));
      EXPECT_EQ(median.without(all[i]), upper_median(others));
    }
  }
  EXPECT_EQ(MedianOfOthers({1}).without(1), std::nullopt);
  EXPECT_EQ(MedianOfOthers({}).without(1), std::nullopt);
}

}  // namespace
}  // namespace tessera::train
