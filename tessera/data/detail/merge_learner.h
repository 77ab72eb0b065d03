// The loop of BPE training: joins the most frequent pair, again and again.
//
// Counts are kept up to date instead of taken anew: a merge visits only the
// words that hold its pair, and a heap gives the next one; an entry whose count
// is out of date goes back with its present count when it comes up.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/data/detail/bpe.h"

namespace tessera::data::detail {

struct CountedWord {
  std::string bytes;
  int64_t count = 0;
};

class MergeLearner {
 public:
  // `tokens`: the bytes of the ids so far, the 256 bytes among them.
  MergeLearner(std::vector<std::string> tokens,
               const std::vector<CountedWord>& words);

  // Until there are `vocab_size` tokens or no pair is left. Now and then
  // `on_tokens` hears how many there are.
  void learn(int64_t vocab_size,
             const std::function<void(int64_t tokens)>& on_tokens = nullptr);

  const std::vector<std::string>& tokens() const { return tokens_; }
  // In the order in which they were learned.
  const std::vector<std::pair<uint32_t, uint32_t>>& merges() const {
    return merges_;
  }

 private:
  // A pair, how often it occurred when this was queued, and words that have it.
  struct Entry {
    int64_t count;
    uint64_t pair;
    uint32_t places;  // in places_
    bool operator<(const Entry& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };
  // Words in which pairs came up, by pair.
  using Places = std::unordered_map<uint64_t, std::vector<uint32_t>>;

  void count_pairs(uint32_t word, Places& places);
  void push(Places& places);
  uint32_t token_of(const std::string& bytes);
  void join(uint32_t word, std::pair<uint32_t, uint32_t> pair, uint32_t token,
            Places& places);

  std::vector<std::string> tokens_;
  IdOfToken ids_;
  std::vector<std::vector<uint32_t>> words_;
  std::vector<int64_t> word_counts_;
  std::unordered_map<uint64_t, int64_t> pair_counts_;
  std::vector<std::vector<uint32_t>> places_;
  std::vector<Entry> heap_;
  std::vector<std::pair<uint32_t, uint32_t>> merges_;
};

}  // namespace tessera::data::detail
