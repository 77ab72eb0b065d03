// Which samples a step takes: a pure function of (seed, weights, step), without
// a state.
//
// A sample is seq_len + 1 tokens: its inputs and, shifted by one, its targets.
// Sample k begins at token k * seq_len, so that neighbours share one token and
// every token but the first is a target once.
// Order:  position p = step * global_batch + i of the run is sample p mod n of
//         epoch p div n. With shuffle, an epoch's samples are permuted by
//         (seed, epoch): each comes once, on whatever mesh. Nothing is stored.
// Sources: where there are several, position p is of the source that the
//         mixture says (see mixture.h), and that source's next one: each has
//         epochs and permutations of its own. Sample k of source s is number k
//         behind the samples of the sources before s.
// Skips:  ranges of positions that are left out: what is taken next comes from
//         behind them, as if the data's order had not had them.
// Resume: the step is all that there is to remember, and what was left out
//         beside the options' skips.
// Errors: TS_CHECK_CONFIG where the data has no whole sample.
// Source: the permutation is a Feistel network with cycle walking: Black and
//         Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/mixture.h"

namespace tessera::data {

// A bijection of 0 .. size-1, keyed by (seed, epoch), in a few words of memory.
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t seed, uint64_t epoch);
  // REQUIRES: i < size.
  uint64_t operator()(uint64_t i) const;

 private:
  static constexpr int kRounds = 8;
  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

// Positions begin .. end - 1.
struct Skip {
  int64_t begin = 0, end = 0;
  bool operator==(const Skip&) const = default;
};

// "batches 101 to 150", as data.skip numbers them; where they are no whole
// ones, or `global_batch` is 0 since steps took others: "samples 7 to 9 in the
// order of the data".
std::string text_of(const Skip& skip, int64_t global_batch);

// Both in one list: ascending, apart.
std::vector<Skip> joined(std::vector<Skip> skips,
                         const std::vector<Skip>& more = {});

struct SamplerOptions {
  int64_t seq_len = 256;
  int64_t global_batch = 8;  // samples a step, over all ranks
  bool shuffle = true;
  uint64_t seed = 0;
  std::vector<Skip> skips = {};  // ascending, apart
};

// Of a source with so many tokens; TS_CHECK_CONFIG where it has none. `name`:
// "data.train", for messages.
int64_t samples_in(int64_t num_tokens, int64_t seq_len,
                   const std::string& name);

class Sampler {
 public:
  Sampler(int64_t num_tokens, const SamplerOptions& options,
          const std::string& name = "data");
  // Of several sources, by their weights. REQUIRES: a sample in each.
  Sampler(const std::vector<int64_t>& sizes, const std::vector<double>& weights,
          const SamplerOptions& options);

  int64_t num_samples() const { return starts_.back(); }
  // The source of a sample, and which of its samples it is.
  Mixture::Place place_of(int64_t sample) const;
  const SamplerOptions& options() const { return options_; }
  // So many samples were taken before this step, whatever their batches were:
  // it takes those that follow. At the beginning: step * global_batch.
  void go_on(int64_t step, int64_t taken) {
    offset_ = taken - step * options_.global_batch;
  }
  // Beside options().skips, from here on.
  void leave_out(const std::vector<Skip>& more);
  int64_t taken_before(int64_t step) const {
    return offset_ + step * options_.global_batch;
  }
  // Where in the order the sample lies before which so many were taken.
  int64_t position_of(int64_t taken) const;
  int64_t first_token(int64_t sample) const {
    return sample * options_.seq_len;
  }

  // Of all ranks, in order. Steps count from 0.
  std::vector<int64_t> sample_indices(int64_t step) const;
  // Of samples first .. first + count - 1 of the step's batch.
  std::vector<int64_t> sample_indices(int64_t step, int64_t first,
                                      int64_t count) const;

 private:
  int64_t num_sources() const {
    return static_cast<int64_t>(starts_.size()) - 1;
  }

  SamplerOptions options_;
  int64_t offset_ = 0;
  std::vector<int64_t> starts_;     // of each source, and the end of the last
  std::optional<Mixture> mixture_;  // of several
};

}  // namespace tessera::data
