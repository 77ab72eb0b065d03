#include "tessera/data/mixture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "tessera/data/hold_out.h"

namespace tessera::data {
namespace {

// Within one sample of its share each, at every position. `error`: by which a
// share may be other than the weight's.
void expect_exact(const std::vector<double>& weights, int64_t count,
                  double error = 1e-12) {
  const Mixture mixture(weights);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_NEAR(mixture.share(i), weights[i] / sum, error);
    EXPECT_EQ(mixture.share(i) > 0, weights[i] > 0);
  }
  std::vector<int64_t> given(weights.size(), 0);
  for (int64_t at = 0; at < count; ++at) {
    const auto place = mixture(at);
    ASSERT_EQ(place.index, given[place.source]++) << "at " << at;
    for (size_t i = 0; i < weights.size(); ++i) {
      const double share = mixture.share(i) * static_cast<double>(at + 1);
      ASSERT_LT(std::abs(static_cast<double>(given[i]) - share), 1 + 1e-9)
          << "source " << i << " of " << weights.size() << " at " << at;
    }
  }
}

constexpr double kRounded = 1e-6;  // a part of 2^20

TEST(MixtureTest, EachSourceHasItsShareAfterAnyNumberOfSamples) {
  expect_exact({1}, 10);
  expect_exact({1, 1}, 100);
  expect_exact({3, 1}, 1000);
  expect_exact({0.7, 0.2, 0.1}, 10'000);
  expect_exact({5, 0, 2.5, 1e-3}, 20'000);
  expect_exact({0.9, 0.02, 0.02, 0.02, 0.02, 0.02}, 10'000);
  expect_exact({0.333333, 0.333333, 0.333334}, 10'000);
  expect_exact({1.0 / 3, std::sqrt(2.0), std::exp(1.0), 1e-9}, 10'000,
               kRounded);
  std::vector<double> many;
  for (int i = 1; i <= 40; ++i) many.push_back(1.0 / i);
  expect_exact(many, 20'000, kRounded);
}

TEST(MixtureTest, ItRepeatsAfterAPeriodInWhichSharesAreWhole) {
  const Mixture mixture({0.7, 0.2, 0.1});
  EXPECT_EQ(mixture.period(), 10);
  EXPECT_DOUBLE_EQ(mixture.share(1), 0.2);
  for (int64_t at = 0; at < 100; ++at) {
    const auto place = mixture(at), later = mixture(at + 10'000'000'000);
    EXPECT_EQ(later.source, place.source);
    const std::vector<int64_t> given = {7, 2, 1};
    EXPECT_EQ(later.index, place.index + 1'000'000'000 * given[place.source]);
  }
  EXPECT_EQ(Mixture({20, 10}).period(), 3);
  EXPECT_EQ(Mixture({1.0 / 3, 2.0 / 3}).period(), 1 << 20);
}

TEST(HoldOutTest, EverySampleIsOfOneKindAndInOrder) {
  for (int64_t size = 1; size <= 60; ++size) {
    for (int64_t held = 0; held < size; ++held) {
      const HoldOut parts(size, held);
      std::set<int64_t> seen;
      for (int64_t i = 0; i < parts.num_kept(); ++i) {
        if (i > 0) {
          EXPECT_GT(parts.kept(i), parts.kept(i - 1));
        }
        seen.insert(parts.kept(i));
      }
      for (int64_t i = 0; i < held; ++i) {
        if (i > 0) {
          const int64_t gap = parts.held(i) - parts.held(i - 1);
          EXPECT_GE(gap, size / held);
          EXPECT_LE(gap, (size + held - 1) / held);
        }
        seen.insert(parts.held(i));
      }
      ASSERT_EQ(seen.size(), static_cast<size_t>(size)) << size << " " << held;
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), size - 1);
    }
  }
  const HoldOut large(int64_t{1} << 50, int64_t{1} << 49);
  EXPECT_EQ(large.kept((int64_t{1} << 49) - 1), (int64_t{1} << 50) - 2);
  EXPECT_EQ(large.held((int64_t{1} << 49) - 1), (int64_t{1} << 50) - 1);
}

}  // namespace
}  // namespace tessera::data
