// Which of several sources a position of the run is from, by their weights.
//
// After any number n of samples each source has given n times its share, to
// within one sample: more is impossible, samples being whole. It is a pure
// function of the weights and the position; nothing is replayed.
// Shares:  weights with at most six digits behind the point are taken exactly,
//          others in parts of 2^20; share() says as what. The order repeats
//          after period() samples, where every share is a whole number.
// Memory:  8 bytes for each position of a period, at most 8 MiB.
// Source:  each sample of a source has a first and a last position at which it
//          keeps to the bound, and whose last one comes first goes first:
//          Baruah et al., "Proportionate progress", Algorithmica 15, 1996.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::data {

class Mixture {
 public:
  // REQUIRES: none is negative, one is more than 0, all are finite.
  explicit Mixture(const std::vector<double>& weights);

  struct Place {
    int64_t source = 0;
    int64_t index = 0;  // this is the index-th sample of that source, from 0
    bool operator==(const Place&) const = default;
  };
  // REQUIRES: position >= 0.
  Place operator()(int64_t position) const;

  int64_t period() const { return static_cast<int64_t>(order_.size()); }
  double share(size_t source) const {
    return static_cast<double>(parts_[source]) / static_cast<double>(period());
  }

 private:
  struct Slot {
    uint32_t source = 0;
    uint32_t index = 0;  // within the period
  };
  std::vector<int64_t> parts_;  // of a period, by source
  std::vector<Slot> order_;     // of a period
};

}  // namespace tessera::data
