#include "tessera/data/tokenizer_trainer.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data/detail/byte_level.h"
#include "tessera/data/detail/document_batches.h"
#include "tessera/data/detail/merge_learner.h"
#include "tessera/data/detail/parallel_for.h"
#include "tessera/data/detail/progress.h"
#include "tessera/data/detail/sections.h"
#include "tessera/data/detail/splitter.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data {
namespace {

using WordCounts = std::unordered_map<std::string, int64_t, detail::StringHash,
                                      std::equal_to<>>;

void count_words(const detail::Splitter& splitter, std::string_view text,
                 WordCounts& counts) {
  detail::WordCursor cursor(splitter, text);
  for (std::string_view word; cursor.next(word);) {
    const auto found = counts.find(word);
    if (found != counts.end()) {
      ++found->second;
    } else {
      counts.emplace(word, 1);
    }
  }
}

class WordCounter {
 public:
  explicit WordCounter(const TokenizerTraining& training)
      : splitter_(training.pattern), threads_(training.threads) {}

  void add(const std::vector<std::string_view>& texts) {
    std::vector<std::string_view> sections;
    for (const std::string_view text : texts) {
      detail::append_sections(text, SectionEnds::kBehindLetters, sections);
    }
    std::mutex mutex;
    detail::parallel_for(sections.size(), threads_, [&] {
      // The counts of one thread join those of all when it has done its last.
      const std::shared_ptr<WordCounts> own(
          new WordCounts, [&](WordCounts* counts) {
            const std::lock_guard lock(mutex);
            for (const auto& [word, count] : *counts) all_[word] += count;
            delete counts;
          });
      return [&, own](size_t i) { count_words(splitter_, sections[i], *own); };
    });
  }

  size_t size() const { return all_.size(); }

  // Sorted, so that nothing depends on threads or hashes.
  std::vector<detail::CountedWord> words() const {
    std::vector<detail::CountedWord> words;
    for (const auto& [word, count] : all_) words.push_back({word, count});
    std::sort(words.begin(), words.end(),
              [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
    return words;
  }

 private:
  const detail::Splitter splitter_;
  const int64_t threads_;
  WordCounts all_;
};

// Special tokens, then the bytes in the order of their code points.
std::vector<std::string> first_tokens(const TokenizerTraining& training) {
  std::vector<std::string> tokens = training.special_tokens;
  std::array<uint8_t, 256> bytes;
  for (int byte = 0; byte < 256; ++byte) {
    bytes[byte] = static_cast<uint8_t>(byte);
  }
  std::sort(bytes.begin(), bytes.end(), [](uint8_t a, uint8_t b) {
    return detail::byte_alphabet()[a] < detail::byte_alphabet()[b];
  });
  for (const uint8_t byte : bytes) {
    tokens.emplace_back(1, static_cast<char>(byte));
  }
  return tokens;
}

void check(const TokenizerTraining& training) {
  const auto least = static_cast<int64_t>(256 + training.special_tokens.size());
  TS_CHECK_CONFIG(training.vocab_size >= least, "a vocabulary of ",
                  training.vocab_size, " is too small: 256 bytes and ",
                  training.special_tokens.size(), " special tokens take ",
                  least, ".");
  for (auto token = training.special_tokens.begin();
       token != training.special_tokens.end(); ++token) {
    TS_CHECK_CONFIG(token->size() > 1 && detail::find_invalid_utf8(*token) ==
                                             std::string_view::npos,
                    "special token '", *token,
                    "': it takes two or more bytes of UTF-8.");
    TS_CHECK_CONFIG(
        std::find(training.special_tokens.begin(), token, *token) == token,
        "special token '", *token, "' is there twice.");
  }
}

// Of a merge that was learned twice the later one counts, as in Hugging Face's
// trainer.
std::vector<std::pair<uint32_t, uint32_t>> without_repeats(
    const std::vector<std::pair<uint32_t, uint32_t>>& merges) {
  std::map<std::pair<uint32_t, uint32_t>, size_t> last;
  for (size_t i = 0; i < merges.size(); ++i) last[merges[i]] = i;
  std::vector<std::pair<uint32_t, uint32_t>> kept;
  for (size_t i = 0; i < merges.size(); ++i) {
    if (last[merges[i]] == i) kept.push_back(merges[i]);
  }
  return kept;
}

TokenizerSpec spec_of(const detail::MergeLearner& learner,
                      const TokenizerTraining& training) {
  TokenizerSpec spec;
  spec.pattern = training.pattern;
  spec.merges = without_repeats(learner.merges());
  const size_t num_special = training.special_tokens.size();
  for (size_t id = 0; id < learner.tokens().size(); ++id) {
    const std::string& token = learner.tokens()[id];
    if (id < num_special) {
      spec.added.push_back({.id = static_cast<int64_t>(id), .content = token});
    }
    spec.tokens.push_back(id < num_special ? token
                                           : detail::to_byte_level(token));
  }
  return spec;
}

Tokenizer learn(const WordCounter& counted, const TokenizerTraining& training) {
  const auto first = first_tokens(training);
  const auto known = static_cast<int64_t>(first.size());
  detail::MergeLearner learner(first, counted.words());
  detail::Progress progress("learning the tokenizer");
  const auto wanted = static_cast<double>(training.vocab_size - known);
  learner.learn(training.vocab_size, [&](int64_t tokens) {
    progress.tell(static_cast<double>(tokens - known), wanted, [&] {
      return c10::str(tokens, " of ", training.vocab_size, " tokens");
    });
  });
  if (static_cast<int64_t>(learner.tokens().size()) < training.vocab_size) {
    log::warning("the text has pairs for a vocabulary of ",
                 learner.tokens().size(), ", not of ", training.vocab_size);
  }
  return Tokenizer(spec_of(learner, training), "the trained tokenizer");
}

}  // namespace

Tokenizer train_tokenizer(const std::vector<std::string_view>& texts,
                          const TokenizerTraining& training) {
  check(training);
  for (size_t i = 0; i < texts.size(); ++i) {
    detail::check_utf8(texts[i], "text " + std::to_string(i));
  }
  WordCounter counter(training);
  counter.add(texts);
  return learn(counter, training);
}

Tokenizer train_tokenizer_on_files(const std::vector<std::string>& paths,
                                   const TokenizerTraining& training,
                                   const DocumentForm& form) {
  check(training);
  WordCounter counter(training);
  detail::DocumentBatches batches(paths, form);
  detail::Progress progress("reading text for the tokenizer");
  while (batches.next()) {
    std::vector<std::string_view> texts;
    for (const auto& part : batches.parts()) texts.push_back(part.text);
    counter.add(texts);
    batches.tell(progress,
                 [&] { return c10::str(counter.size(), " different words"); });
  }
  return learn(counter, training);
}

}  // namespace tessera::data
