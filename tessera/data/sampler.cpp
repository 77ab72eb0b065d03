#include "tessera/data/sampler.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <utility>

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

// Sources of one size are to have orders of their own.
uint64_t seed_of(uint64_t seed, int64_t source) {
  return source == 0 ? seed : mix(seed + static_cast<uint64_t>(source));
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

std::string text_of(const Skip& skip, int64_t global_batch) {
  if (global_batch == 0 || skip.begin % global_batch != 0 ||
      skip.end % global_batch != 0) {
    return c10::str("samples ", skip.begin, " to ", skip.end - 1,
                    " in the order of the data");
  }
  const int64_t first = skip.begin / global_batch + 1,
                last = skip.end / global_batch;
  return first == last ? c10::str("batch ", first)
                       : c10::str("batches ", first, " to ", last);
}

std::vector<Skip> joined(std::vector<Skip> skips,
                         const std::vector<Skip>& more) {
  skips.insert(skips.end(), more.begin(), more.end());
  std::ranges::sort(skips, {}, &Skip::begin);
  std::vector<Skip> all;
  for (const Skip& skip : skips) {
    if (!all.empty() && skip.begin <= all.back().end) {
      all.back().end = std::max(all.back().end, skip.end);
    } else {
      all.push_back(skip);
    }
  }
  return all;
}

int64_t samples_in(int64_t num_tokens, int64_t seq_len,
                   const std::string& name) {
  TS_CHECK_CONFIG(num_tokens > seq_len, name, ": has ", num_tokens,
                  " tokens, but one sample of seq_len ", seq_len, " takes ",
                  seq_len, " + 1. Give more data, or a smaller data.seq_len.");
  return (num_tokens - 1) / seq_len;
}

Sampler::Sampler(int64_t num_tokens, const SamplerOptions& options,
                 const std::string& name)
    : options_(options) {
  TS_CHECK_CONFIG(options.seq_len > 0 && options.global_batch > 0, name,
                  ": seq_len (", options.seq_len, ") and the global batch (",
                  options.global_batch, ") must be at least 1.");
  starts_ = {0, samples_in(num_tokens, options.seq_len, name)};
}

Sampler::Sampler(const std::vector<int64_t>& sizes,
                 const std::vector<double>& weights,
                 const SamplerOptions& options)
    : options_(options), starts_{0} {
  TORCH_INTERNAL_ASSERT(!sizes.empty() && sizes.size() == weights.size());
  for (const int64_t size : sizes) {
    TORCH_INTERNAL_ASSERT(size > 0);
    starts_.push_back(starts_.back() + size);
  }
  if (sizes.size() > 1) mixture_.emplace(weights);
}

Mixture::Place Sampler::place_of(int64_t sample) const {
  const auto next = std::upper_bound(starts_.begin(), starts_.end(), sample);
  const int64_t source = next - starts_.begin() - 1;
  return {source, sample - starts_[source]};
}

void Sampler::leave_out(const std::vector<Skip>& more) {
  options_.skips = joined(std::move(options_.skips), more);
}

int64_t Sampler::position_of(int64_t taken) const {
  int64_t position = taken;
  for (const Skip& skip : options_.skips) {
    if (position < skip.begin) break;
    position += skip.end - skip.begin;
  }
  return position;
}

std::vector<int64_t> Sampler::sample_indices(int64_t step) const {
  return sample_indices(step, 0, options_.global_batch);
}

std::vector<int64_t> Sampler::sample_indices(int64_t step, int64_t first,
                                             int64_t count) const {
  TORCH_INTERNAL_ASSERT(step >= 0 && first >= 0 && count >= 0 &&
                            first + count <= options_.global_batch,
                        "samples ", first, " + ", count, " of step ", step);
  // Of each source that of the epoch at hand.
  std::vector<std::optional<Permutation>> permutations(num_sources());
  std::vector<int64_t> permuted_epochs(num_sources(), -1);
  std::vector<int64_t> samples;
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t position = position_of(taken_before(step) + i);
    const auto place =
        mixture_ ? (*mixture_)(position) : Mixture::Place{0, position};
    const int64_t size = starts_[place.source + 1] - starts_[place.source];
    const int64_t epoch = place.index / size;
    int64_t sample = place.index % size;
    if (options_.shuffle) {
      auto& permutation = permutations[place.source];
      if (epoch != permuted_epochs[place.source]) {
        permutation.emplace(size, seed_of(options_.seed, place.source), epoch);
        permuted_epochs[place.source] = epoch;
      }
      sample = static_cast<int64_t>((*permutation)(sample));
    }
    samples.push_back(starts_[place.source] + sample);
  }
  return samples;
}

}  // namespace tessera::data
