#include "tessera/core/random.h"

#include <algorithm>

#include "tessera/core/detail/normal.h"
#include "tessera/core/hash.h"

namespace tessera::random {
namespace {

constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

// Pairs that fill() computes together, one in each lane.
constexpr uint64_t kLanes = 64;

uint32_t low(uint64_t word) { return static_cast<uint32_t>(word); }
uint32_t high(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

// The upper 53 bits times 2^-53, without a conversion of integers, for which
// x86 has no vector instruction.
double to_uniform(uint64_t bits) {
  constexpr uint64_t kOne = 0x3ff0000000000000;
  const double upper = std::bit_cast<double>(kOne | (bits >> 12)) - 1.0;
  const double last =
      std::bit_cast<double>(kOne | ((bits & 0x800) << 41)) - 1.0;  // 0 or 1/2
  return upper + last * 0x1p-52;
}

// The words of kLanes counters: 64 bits each, so that products fit and
// compilers use vector instructions.
struct Words {
  std::array<uint64_t, kLanes> at[4];

  void round(uint64_t key0, uint64_t key1) {
    for (uint64_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t product0 = kMultiplier0 * at[0][lane];
      const uint64_t product1 = kMultiplier1 * at[2][lane];
      at[0][lane] = (product1 >> 32) ^ at[1][lane] ^ key0;
      at[1][lane] = product1 & 0xffffffff;
      at[2][lane] = (product0 >> 32) ^ at[3][lane] ^ key1;
      at[3][lane] = product0 & 0xffffffff;
    }
  }
};

}  // namespace

PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {high(product1) ^ counter[1] ^ key[0], low(product1),
               high(product0) ^ counter[3] ^ key[1], low(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

Stream::Stream(uint64_t seed, std::string_view name) {
  const auto hash = hash128(name, seed);
  key_ = {low(hash.low), high(hash.low)};
  high_counter_ = {low(hash.high), high(hash.high)};
}

// Elements 2 * pair and 2 * pair + 1.
std::array<uint64_t, 2> Stream::pair_bits(uint64_t pair) const {
  const auto words = philox4x32_10(
      {low(pair), high(pair), high_counter_[0], high_counter_[1]}, key_);
  return {words[0] | uint64_t{words[1]} << 32,
          words[2] | uint64_t{words[3]} << 32};
}

uint64_t Stream::bits(uint64_t index) const {
  return pair_bits(index / 2)[index % 2];
}

double Stream::uniform(uint64_t index) const { return to_uniform(bits(index)); }

uint64_t Stream::below(uint64_t index, uint64_t bound) const {
  return static_cast<uint64_t>(
      (static_cast<unsigned __int128>(bits(index)) * bound) >> 64);
}

double Stream::normal(uint64_t index) const {
  double value = 0;
  fill(&value, index, 1, 0.0, 1.0);
  return value;
}

// out[2 * lane], out[2 * lane + 1]: the normals of pair first_pair + lane.
void Stream::normal_pairs(uint64_t first_pair, double* out) const {
  Words x;
  for (uint64_t lane = 0; lane < kLanes; ++lane) {
    x.at[0][lane] = low(first_pair + lane);
    x.at[1][lane] = high(first_pair + lane);
    x.at[2][lane] = high_counter_[0];
    x.at[3][lane] = high_counter_[1];
  }
  PhiloxKey key = key_;
  for (int round = 0; round < kRounds; ++round) {
    x.round(key[0], key[1]);
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  std::array<double, kLanes> radius, sine, cosine;
  for (uint64_t lane = 0; lane < kLanes; ++lane) {
    const double u = to_uniform(x.at[0][lane] | x.at[1][lane] << 32);
    const double v = to_uniform(x.at[2][lane] | x.at[3][lane] << 32);
    // 1 - u is in (0, 1]: its logarithm is finite.
    radius[lane] = -2.0 * detail::log_of(1.0 - u);
    const auto turn = detail::sine_cosine_of_turn(v);
    sine[lane] = turn.sine;
    cosine[lane] = turn.cosine;
  }
  for (uint64_t lane = 0; lane < kLanes; ++lane) {
    const double r = std::sqrt(radius[lane]);
    out[2 * lane] = r * cosine[lane];
    out[2 * lane + 1] = r * sine[lane];
  }
}

template <typename T>
void Stream::fill(T* out, uint64_t first_index, uint64_t count, double mean,
                  double std) const {
  std::array<double, 2 * kLanes> normals;
  while (count > 0) {
    normal_pairs(first_index / 2, normals.data());
    const uint64_t skipped = first_index % 2;
    const uint64_t taken = std::min(count, normals.size() - skipped);
    for (uint64_t i = 0; i < taken; ++i) {
      out[i] = static_cast<T>(mean + std * normals[skipped + i]);
    }
    out += taken;
    first_index += taken;
    count -= taken;
  }
}

void Stream::fill_normal(float* out, uint64_t first_index, uint64_t count,
                         double mean, double std) const {
  fill(out, first_index, count, mean, std);
}

void Stream::fill_normal(double* out, uint64_t first_index, uint64_t count,
                         double mean, double std) const {
  fill(out, first_index, count, mean, std);
}

}  // namespace tessera::random
