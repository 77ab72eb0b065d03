// Random numbers without a state: element i of the stream (seed, name) is a
// pure function of the three. Any slice, on any rank, has the whole's bits.
//
// Use:     random::Stream weights(seed, "blocks.0.mlp.up.weight");
//          weights.fill_normal(data, first_index, count, 0.0, 0.02);
// Source:  Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
//          as easy as 1, 2, 3", SC 2011. Normal: Box and Muller 1958, in
//          double; a float is the double rounded.
// Streams: key and half of the counter are a 128-bit hash of (seed, name).
// Bits:    they depend on IEEE arithmetic alone, not on the C library.
// Threads: any; a Stream is a value.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera::random {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// Four words that look random, of a counter and a key.
PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key);

class Stream {
 public:
  Stream(uint64_t seed, std::string_view name);

  // 64 random bits.
  uint64_t bits(uint64_t index) const;
  // In [0, 1), a multiple of 2^-53.
  double uniform(uint64_t index) const;
  // In [0, bound), every value equally likely to 2^-64. REQUIRES: bound > 0.
  uint64_t below(uint64_t index, uint64_t bound) const;
  // Mean 0, standard deviation 1.
  double normal(uint64_t index) const;

  // out[k] = mean + std * normal(first_index + k), k = 0 .. count-1.
  void fill_normal(float* out, uint64_t first_index, uint64_t count,
                   double mean, double std) const;
  void fill_normal(double* out, uint64_t first_index, uint64_t count,
                   double mean, double std) const;

 private:
  std::array<uint64_t, 2> pair_bits(uint64_t pair) const;
  void normal_pairs(uint64_t first_pair, double* out) const;
  template <typename T>
  void fill(T* out, uint64_t first_index, uint64_t count, double mean,
            double std) const;

  PhiloxKey key_;
  std::array<uint32_t, 2> high_counter_;
};

}  // namespace tessera::random
