#include "tessera/data/sampler.h"

#include <bit>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/random.h"

namespace tessera::data {
namespace {

// The mixing of splitmix64: every bit of the result hangs on every bit of x.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(uint64_t size, uint64_t seed, uint64_t epoch)
    : size_(size), half_bits_((std::bit_width(size - 1) + 1) / 2) {
  const random::Stream stream(seed, "data order");
  for (int round = 0; round < kRounds; ++round) {
    keys_[round] = stream.bits(epoch * kRounds + round);
  }
}

// A permutation of 0 .. 4^half_bits - 1, walked until it is in the range.
uint64_t Permutation::operator()(uint64_t i) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = i >> half_bits_;
    uint64_t right = i & mask;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (mix(right ^ key) & mask);
      left = right;
      right = next;
    }
    i = (left << half_bits_) | right;
  } while (i >= size_);
  return i;
}

Sampler::Sampler(int64_t num_tokens, const SamplerOptions& options,
                 const std::string& name)
    : options_(options) {
  TS_CHECK_CONFIG(options.seq_len > 0 && options.global_batch > 0, name,
                  ": seq_len (", options.seq_len, ") and the global batch (",
                  options.global_batch, ") must be at least 1.");
  num_samples_ = (num_tokens - 1) / options.seq_len;
  TS_CHECK_CONFIG(num_tokens > options.seq_len, name, ": has ", num_tokens,
                  " tokens, but one sample of seq_len ", options.seq_len,
                  " takes ", options.seq_len,
                  " + 1. Give more data, or a smaller data.seq_len.");
}

std::vector<int64_t> Sampler::sample_indices(int64_t step) const {
  return sample_indices(step, 0, options_.global_batch);
}

std::vector<int64_t> Sampler::sample_indices(int64_t step, int64_t first,
                                             int64_t count) const {
  TORCH_INTERNAL_ASSERT(step >= 0 && first >= 0 && count >= 0 &&
                            first + count <= options_.global_batch,
                        "samples ", first, " + ", count, " of step ", step);
  std::vector<int64_t> samples;
  std::optional<Permutation> permutation;
  int64_t permuted_epoch = -1;
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t position = step * options_.global_batch + i;
    const int64_t epoch = position / num_samples_;
    const int64_t sample = position % num_samples_;
    if (options_.shuffle && epoch != permuted_epoch) {
      permutation.emplace(num_samples_, options_.seed, epoch);
      permuted_epoch = epoch;
    }
    samples.push_back(permutation ? static_cast<int64_t>((*permutation)(sample))
                                  : sample);
  }
  return samples;
}

}  // namespace tessera::data
