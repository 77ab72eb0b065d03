#include "tessera/core/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <vector>

#include "tessera/core/detail/normal.h"

namespace tessera::random {
namespace {

// The vectors of the Random123 library (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                          {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                          {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Weights drawn by one build must be those of the next.
TEST(Stream, ValuesStayWhatTheyAre) {
  EXPECT_EQ(Stream(0, "").bits(0), 0xc181ab0c0834e155);
  const Stream stream(7, "blocks.0.mlp.up.weight");
  EXPECT_EQ(stream.bits(0), 0xbd28413a905a405c);
  EXPECT_EQ(stream.bits(1), 0xa455e190c575049b);
  EXPECT_EQ(stream.bits(1000000007), 0x1c43c9b555c548ec);
  EXPECT_EQ(stream.normal(0), -1.0291786925679978);
  EXPECT_EQ(stream.normal(1), -1.2753275170068095);
  EXPECT_EQ(stream.normal(1000000007), 0.28987384148629203);
}

// Against the C library, in long double.
TEST(Stream, NormalIsBoxAndMullersOfTheBits) {
  const Stream stream(8, "formula");
  for (uint64_t pair = 0; pair < 20000; ++pair) {
    const long double u = stream.uniform(2 * pair);
    const long double turn = stream.uniform(2 * pair + 1);
    const long double radius = sqrtl(-2 * log1pl(-u));
    const long double angle = 2 * std::numbers::pi_v<long double> * turn;
    const double tolerance = 8e-16 * std::max(1.0, static_cast<double>(radius));
    ASSERT_NEAR(stream.normal(2 * pair), radius * cosl(angle), tolerance);
    ASSERT_NEAR(stream.normal(2 * pair + 1), radius * sinl(angle), tolerance);
  }
}

TEST(NormalArithmetic, AtTheEdges) {
  EXPECT_EQ(detail::log_of(1.0), 0.0);
  EXPECT_DOUBLE_EQ(detail::log_of(0x1p-53), -53 * std::numbers::ln2);
  EXPECT_DOUBLE_EQ(detail::log_of(1.0 - 0x1p-53), std::log1p(-0x1p-53));
  for (int eighth = 0; eighth < 8; ++eighth) {
    const auto [sine, cosine] = detail::sine_cosine_of_turn(eighth / 8.0);
    EXPECT_NEAR(sine, std::sin(eighth * std::numbers::pi / 4), 1e-15);
    EXPECT_NEAR(cosine, std::cos(eighth * std::numbers::pi / 4), 1e-15);
  }
  EXPECT_NEAR(detail::sine_cosine_of_turn(1.0 - 0x1p-53).cosine, 1.0, 1e-15);
}

TEST(Stream, DependsOnSeedNameAndIndexAlone) {
  std::set<uint64_t> seen;
  for (uint64_t seed : {0, 1, 2}) {
    for (const char* name : {"", "a", "b", "ab"}) {
      const Stream stream(seed, name);
      for (uint64_t index = 0; index < 100; ++index) {
        seen.insert(stream.bits(index));
        EXPECT_EQ(stream.bits(index), Stream(seed, name).bits(index));
      }
      for (int bit = 32; bit < 64; ++bit) {
        seen.insert(stream.bits(uint64_t{1} << bit));
      }
    }
  }
  EXPECT_EQ(seen.size(), 3 * 4 * 132);
}

TEST(Stream, ASliceHasTheBitsOfTheWhole) {
  const Stream stream(3, "weights");
  std::vector<double> whole(101);
  stream.fill_normal(whole.data(), 1000, whole.size(), 0.5, 2.0);
  for (size_t begin : {0, 1, 2, 7, 50, 100}) {
    for (size_t count : {0, 1, 2, 3, 20, 101}) {
      if (begin + count > whole.size()) continue;
      std::vector<double> slice(count);
      stream.fill_normal(slice.data(), 1000 + begin, count, 0.5, 2.0);
      EXPECT_TRUE(std::equal(slice.begin(), slice.end(),
                             whole.begin() + static_cast<ptrdiff_t>(begin)));
    }
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(whole[i], 0.5 + 2.0 * stream.normal(1000 + i));
  }
}

TEST(Stream, AFloatIsTheDoubleRounded) {
  const Stream stream(3, "weights");
  std::vector<double> wide(64);
  std::vector<float> narrow(64);
  stream.fill_normal(wide.data(), 5, 64, 0.0, 0.02);
  stream.fill_normal(narrow.data(), 5, 64, 0.0, 0.02);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(narrow[i], static_cast<float>(wide[i]));
  }
}

// Of n = 2^20 draws, fixed by the seed: a bound of five standard deviations of
// each statistic fails only where the generator is wrong.
TEST(Stream, NormalHasItsMoments) {
  constexpr size_t n = size_t{1} << 20;
  std::vector<double> x(n);
  Stream(11, "moments").fill_normal(x.data(), 0, n, 0.0, 1.0);
  double sum[5] = {};
  double neighbours = 0;
  size_t beyond_two = 0;
  for (size_t i = 0; i < n; ++i) {
    for (int power = 1; power <= 4; ++power)
      sum[power] += std::pow(x[i], power);
    if (i > 0) neighbours += x[i] * x[i - 1];
    beyond_two += std::abs(x[i]) > 2.0 ? 1 : 0;
  }
  const double root = std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(sum[1] / n, 0.0, 5 / root);
  EXPECT_NEAR(sum[2] / n, 1.0, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(sum[3] / n, 0.0, 5 * std::sqrt(15.0) / root);
  EXPECT_NEAR(sum[4] / n, 3.0, 5 * std::sqrt(96.0) / root);
  EXPECT_NEAR(neighbours / n, 0.0, 5 / root);
  const double share = std::erfc(std::sqrt(2.0));
  EXPECT_NEAR(static_cast<double>(beyond_two) / n, share,
              5 * std::sqrt(share) / root);
}

// Kolmogorov and Smirnov: sqrt(n) D stays below 1.95 in 99.9% of samples.
TEST(Stream, UniformIsUniform) {
  constexpr size_t n = size_t{1} << 16;
  const Stream stream(12, "uniform");
  std::vector<double> x(n);
  for (size_t i = 0; i < n; ++i) {
    x[i] = stream.uniform(i);
    ASSERT_TRUE(x[i] >= 0.0 && x[i] < 1.0);
  }
  std::sort(x.begin(), x.end());
  double distance = 0;
  for (size_t i = 0; i < n; ++i) {
    distance = std::max(distance, std::abs(x[i] - (i + 0.5) / n) + 0.5 / n);
  }
  EXPECT_LT(distance * std::sqrt(static_cast<double>(n)), 1.95);
}

TEST(Stream, BelowReachesEveryValueEqually) {
  const Stream stream(13, "below");
  std::vector<int> hits(7);
  for (uint64_t i = 0; i < 70000; ++i) ++hits[stream.below(i, 7)];
  for (int count : hits) EXPECT_NEAR(count, 10000, 5 * std::sqrt(8571.0));
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(stream.below(i, 1), 0);
}

}  // namespace
}  // namespace tessera::random
