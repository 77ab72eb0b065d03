#include "tessera/data/detail/bpe.h"

#include <bit>
#include <cstring>
#include <queue>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/core/error.h"

namespace tessera::data::detail {
namespace {

// Up to this many bytes, looking at all pairs for the best one is faster than
// a queue.
constexpr size_t kShortWord = 64;

uint64_t pair_key(uint32_t left, uint32_t right) {
  return (uint64_t{left} << 32) | right;
}

uint64_t mix(uint64_t key) {
  key *= 0x9e3779b97f4a7c15;
  return key ^ (key >> 32);
}

// A pair of neighbours in a long word, as it was when it was queued.
struct Candidate {
  uint32_t rank;
  uint32_t left;  // place of the left one
  uint32_t token;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

// A token of a long word, linked with those beside it.
struct Symbol {
  uint32_t token;
  uint32_t previous;
  uint32_t next;
};
constexpr uint32_t kEnd = UINT32_MAX;

}  // namespace

Bpe::Bpe(const std::vector<std::string>& tokens,
         const std::vector<std::pair<uint32_t, uint32_t>>& merges,
         bool ignore_merges) {
  IdOfToken ids;
  for (uint32_t id = 0; id < tokens.size(); ++id) {
    if (!tokens[id].empty()) ids.emplace(tokens[id], id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    byte_tokens_[byte] = ids.at(std::string(1, static_cast<char>(byte)));
  }
  slots_.resize(std::bit_ceil(2 * merges.size() + 2));
  for (uint32_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merges[rank];
    const uint64_t pair = pair_key(left, right);
    slots_[slot_of(pair)] = {pair,
                             {rank, ids.at(tokens[left] + tokens[right])}};
  }
  if (ignore_merges) whole_words_ = std::move(ids);
}

size_t Bpe::slot_of(uint64_t pair) const {
  size_t i = mix(pair) & (slots_.size() - 1);
  while (slots_[i].pair != pair && slots_[i].pair != UINT64_MAX) {
    i = (i + 1) & (slots_.size() - 1);
  }
  return i;
}

Merge Bpe::merge_of(uint32_t left, uint32_t right) const {
  return slots_[slot_of(pair_key(left, right))].merge;
}

uint32_t Bpe::whole_word(std::string_view word) const {
  const auto found = whole_words_.find(word);
  return found == whole_words_.end() ? kNoToken : found->second;
}

WordEncoder::WordEncoder(const Bpe& bpe, size_t cache_words)
    : bpe_(bpe), cache_(cache_words) {}

void WordEncoder::encode(std::string_view word, std::vector<uint32_t>& ids) {
  if (word.size() > kMaxBytes) return merge(word, ids);
  CachedWord& cached =
      cache_[XXH3_64bits(word.data(), word.size()) & (cache_.size() - 1)];
  if (cached.size == word.size() &&
      std::memcmp(cached.bytes, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), cached.tokens, cached.tokens + cached.num_tokens);
    return;
  }
  const size_t before = ids.size();
  merge(word, ids);
  const size_t num_tokens = ids.size() - before;
  if (num_tokens > kMaxTokens) return;
  std::memcpy(cached.bytes, word.data(), word.size());
  std::copy(ids.begin() + before, ids.end(), cached.tokens);
  cached.size = static_cast<uint8_t>(word.size());
  cached.num_tokens = static_cast<uint8_t>(num_tokens);
}

void WordEncoder::merge(std::string_view word, std::vector<uint32_t>& ids) {
  const uint32_t whole = bpe_.whole_word(word);
  if (whole != kNoToken) {
    ids.push_back(whole);
  } else if (word.size() <= kShortWord) {
    merge_short(word, ids);
  } else {
    merge_long(word, ids);
  }
}

void WordEncoder::merge_short(std::string_view word,
                              std::vector<uint32_t>& ids) {
  std::array<uint32_t, kShortWord> tokens;
  std::array<Merge, kShortWord> merges;  // of tokens[i] and tokens[i + 1]
  size_t size = word.size();
  for (size_t i = 0; i < size; ++i) {
    tokens[i] = bpe_.byte_token(static_cast<uint8_t>(word[i]));
  }
  const auto update = [&](size_t i) {
    if (i + 1 < size) merges[i] = bpe_.merge_of(tokens[i], tokens[i + 1]);
  };
  for (size_t i = 0; i + 1 < size; ++i) update(i);
  while (size > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < size; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].token == kNoToken) break;
    tokens[best] = merges[best].token;
    --size;
    for (size_t i = best + 1; i < size; ++i) {
      tokens[i] = tokens[i + 1];
      merges[i] = merges[i + 1];
    }
    update(best);
    if (best > 0) update(best - 1);
  }
  ids.insert(ids.end(), tokens.begin(), tokens.begin() + size);
}

void WordEncoder::merge_long(std::string_view word,
                             std::vector<uint32_t>& ids) {
  TS_CHECK(word.size() < kEnd, "a word of ", word.size(),
           " bytes is too long to encode.");
  const auto size = static_cast<uint32_t>(word.size());
  std::vector<Symbol> symbols(size);
  for (uint32_t i = 0; i < size; ++i) {
    symbols[i] = {bpe_.byte_token(static_cast<uint8_t>(word[i])),
                  i == 0 ? kEnd : i - 1, i + 1 == size ? kEnd : i + 1};
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](uint32_t left) {
    if (left == kEnd || symbols[left].next == kEnd) return;
    const Merge merge =
        bpe_.merge_of(symbols[left].token, symbols[symbols[left].next].token);
    if (merge.token != kNoToken) queue.push({merge.rank, left, merge.token});
  };
  for (uint32_t i = 0; i + 1 < size; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    if (left.token == kNoToken || left.next == kEnd) continue;
    Symbol& right = symbols[left.next];
    // What was queued may have been merged with others since.
    if (bpe_.merge_of(left.token, right.token).rank != best.rank) continue;
    left.token = best.token;
    right.token = kNoToken;
    left.next = right.next;
    if (left.next != kEnd) symbols[left.next].previous = best.left;
    consider(best.left);
    consider(left.previous);
  }
  for (uint32_t i = 0; i != kEnd; i = symbols[i].next) {
    ids.push_back(symbols[i].token);
  }
}

}  // namespace tessera::data::detail
