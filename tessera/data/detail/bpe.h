// The merges of a byte-level BPE vocabulary, applied to words.
//
// A word starts as its bytes' tokens; the pair of neighbours that was learned
// first is joined, the leftmost of equals first, until no pair is known.
// Threads: a Bpe is shared; each thread has a WordEncoder of its own.
// Source:  Sennrich et al., arXiv 1508.07909.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::data::detail {

inline constexpr uint32_t kNoToken = UINT32_MAX;

struct StringHash {
  // The standard library looks for this name.
  using is_transparent = void;  // NOLINT(readability-identifier-naming)
  size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};
// Looked up by std::string_view, without a copy.
using IdOfToken =
    std::unordered_map<std::string, uint32_t, StringHash, std::equal_to<>>;

// Where two neighbouring tokens lead.
struct Merge {
  uint32_t rank = UINT32_MAX;  // the smaller, the earlier
  uint32_t token = kNoToken;
};

class Bpe {
 public:
  // `tokens`: the bytes of each id ("": none). `merges`: in order; of a pair
  // that is there twice the last counts. REQUIRES: every byte has a token, and
  // every merge's concatenation.
  Bpe(const std::vector<std::string>& tokens,
      const std::vector<std::pair<uint32_t, uint32_t>>& merges,
      bool ignore_merges);

  uint32_t byte_token(uint8_t byte) const { return byte_tokens_[byte]; }
  // rank UINT32_MAX: the two do not merge.
  Merge merge_of(uint32_t left, uint32_t right) const;
  // The token that is the whole word where merges are to be ignored for it.
  uint32_t whole_word(std::string_view word) const;

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;
    Merge merge;
  };
  size_t slot_of(uint64_t pair) const;

  std::array<uint32_t, 256> byte_tokens_;
  std::vector<Slot> slots_;  // open addressing; a power of two, half empty
  IdOfToken whole_words_;
};

class WordEncoder {
 public:
  // `cache_words`: how many words' tokens are kept; a power of two.
  WordEncoder(const Bpe& bpe, size_t cache_words);

  // Appends the tokens of `word`.
  void encode(std::string_view word, std::vector<uint32_t>& ids);

 private:
  // Text repeats its words: the tokens of short ones are kept, one word a
  // place, and a newer one takes the place.
  static constexpr size_t kMaxBytes = 27;
  static constexpr size_t kMaxTokens = 8;
  struct CachedWord {
    char bytes[kMaxBytes];
    uint8_t size = 0;
    uint8_t num_tokens = 0;
    uint32_t tokens[kMaxTokens];
  };

  void merge(std::string_view word, std::vector<uint32_t>& ids);
  void merge_short(std::string_view word, std::vector<uint32_t>& ids);
  void merge_long(std::string_view word, std::vector<uint32_t>& ids);

  const Bpe& bpe_;
  std::vector<CachedWord> cache_;
};

}  // namespace tessera::data::detail
