// Cuts text into the words that BPE works on, by the regular expressions of the
// tokenizers that are known here.
//
// An expression of any other tokenizer is not guessed at: engines differ in
// what \s or (?i) mean, and a tokenizer that is almost right is wrong.
// Threads: a Splitter is shared; each thread has WordCursors of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/data/tokenizer_spec.h"

namespace tessera::data::detail {

// The expression as tokenizer.json has it.
const std::string& regex_of(SplitPattern pattern);
std::optional<SplitPattern> pattern_of(const std::string& regex);

class Splitter {
 public:
  explicit Splitter(SplitPattern pattern);
  ~Splitter();
  Splitter(Splitter&&) noexcept;
  Splitter& operator=(Splitter&&) noexcept;

 private:
  friend class WordCursor;
  struct Code;
  std::unique_ptr<Code> code_;
};

// Walks over the words of one text, which together are the text.
// REQUIRES: the text is valid UTF-8; it and the splitter outlive the cursor.
class WordCursor {
 public:
  WordCursor(const Splitter& splitter, std::string_view text);
  ~WordCursor();
  WordCursor(const WordCursor&) = delete;
  WordCursor& operator=(const WordCursor&) = delete;

  // False at the end of the text.
  bool next(std::string_view& word);

 private:
  struct Match;
  std::unique_ptr<Match> match_;
  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace tessera::data::detail
