// What `tessera generate` begins with, and how it shows what follows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/tokenizer.h"

namespace tessera::cli {

// Of a file, or of standard input ("-"), without a last newline.
std::string prompt_from(const std::string& file);

// A text whose tokens come one by one, from the prompt on. It ends before the
// first of `stops` that follows the prompt.
class GeneratedText {
 public:
  GeneratedText(const data::Tokenizer& tokenizer, std::vector<int64_t> prompt,
                const std::vector<std::string>& stops);

  // False where the text ends with this token.
  bool add(int64_t id);
  // What is certain by now and was not taken yet: whole characters, none of
  // which may still turn out to begin a stop.
  std::string take();
  // The rest, once no token follows.
  std::string take_rest();
  bool has_stopped() const { return stopped_; }

 private:
  std::string take_up_to(size_t end);

  const data::Tokenizer& tokenizer_;
  const std::vector<std::string>& stops_;
  std::vector<int64_t> ids_;
  std::string text_;
  size_t prompt_size_ = 0;  // bytes
  size_t taken_ = 0;
  bool stopped_ = false;
};

}  // namespace tessera::cli
