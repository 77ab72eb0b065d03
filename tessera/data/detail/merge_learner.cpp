#include "tessera/data/detail/merge_learner.h"

#include <algorithm>

namespace tessera::data::detail {
namespace {

uint64_t key_of(uint32_t left, uint32_t right) {
  return (uint64_t{left} << 32) | right;
}

std::pair<uint32_t, uint32_t> pair_of(uint64_t key) {
  return {static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)};
}

}  // namespace

MergeLearner::MergeLearner(std::vector<std::string> tokens,
                           const std::vector<CountedWord>& words)
    : tokens_(std::move(tokens)) {
  for (uint32_t id = 0; id < tokens_.size(); ++id) {
    ids_.emplace(tokens_[id], id);
  }
  Places places;
  for (const CountedWord& word : words) {
    std::vector<uint32_t> symbols;
    for (const char c : word.bytes) symbols.push_back(ids_.at({c}));
    words_.push_back(std::move(symbols));
    word_counts_.push_back(word.count);
    count_pairs(static_cast<uint32_t>(words_.size() - 1), places);
  }
  push(places);
}

void MergeLearner::count_pairs(uint32_t word, Places& places) {
  const std::vector<uint32_t>& symbols = words_[word];
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const uint64_t key = key_of(symbols[i], symbols[i + 1]);
    pair_counts_[key] += word_counts_[word];
    std::vector<uint32_t>& place = places[key];
    if (place.empty() || place.back() != word) place.push_back(word);
  }
}

void MergeLearner::push(Places& places) {
  for (auto& [key, words] : places) {
    const int64_t count = pair_counts_[key];
    if (count <= 0) continue;
    places_.push_back(std::move(words));
    heap_.push_back({count, key, static_cast<uint32_t>(places_.size() - 1)});
    std::push_heap(heap_.begin(), heap_.end());
  }
}

void MergeLearner::learn(int64_t vocab_size,
                         const std::function<void(int64_t tokens)>& on_tokens) {
  constexpr size_t kBetween = 64;  // tokens
  while (static_cast<int64_t>(tokens_.size()) < vocab_size && !heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    Entry& top = heap_.back();
    const int64_t count = pair_counts_[top.pair];
    if (top.count != count) {
      top.count = count;
      std::push_heap(heap_.begin(), heap_.end());
      continue;
    }
    if (count < 1) return;
    const auto pair = pair_of(top.pair);
    const std::vector<uint32_t> words = std::move(places_[top.places]);
    heap_.pop_back();
    const uint32_t token = token_of(tokens_[pair.first] + tokens_[pair.second]);
    merges_.push_back(pair);
    Places places;
    for (const uint32_t word : words) join(word, pair, token, places);
    push(places);
    if (on_tokens && merges_.size() % kBetween == 0) {
      on_tokens(static_cast<int64_t>(tokens_.size()));
    }
  }
}

// The same bytes may come about by another merge: they stay one token.
uint32_t MergeLearner::token_of(const std::string& bytes) {
  const auto [place, is_new] =
      ids_.emplace(bytes, static_cast<uint32_t>(tokens_.size()));
  if (is_new) tokens_.push_back(bytes);
  return place->second;
}

void MergeLearner::join(uint32_t word, std::pair<uint32_t, uint32_t> pair,
                        uint32_t token, Places& places) {
  std::vector<uint32_t>& symbols = words_[word];
  const int64_t count = word_counts_[word];
  const auto appeared = [&](uint32_t left, uint32_t right) {
    const uint64_t key = key_of(left, right);
    pair_counts_[key] += count;
    std::vector<uint32_t>& place = places[key];
    if (place.empty() || place.back() != word) place.push_back(word);
  };
  size_t size = 0;  // of what has been joined so far, in place
  for (size_t i = 0; i < symbols.size(); ++i) {
    const bool found = symbols[i] == pair.first && i + 1 < symbols.size() &&
                       symbols[i + 1] == pair.second;
    if (!found) {
      symbols[size++] = symbols[i];
      continue;
    }
    ++i;
    if (size > 0) {
      pair_counts_[key_of(symbols[size - 1], pair.first)] -= count;
      appeared(symbols[size - 1], token);
    }
    symbols[size++] = token;
    if (i + 1 < symbols.size()) {
      pair_counts_[key_of(pair.second, symbols[i + 1])] -= count;
      appeared(token, symbols[i + 1]);
    }
  }
  symbols.resize(size);
}

}  // namespace tessera::data::detail
