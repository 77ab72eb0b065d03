#include "cli/generated_text.h"

#include <algorithm>

#include "cli/standard_input.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::cli {
namespace {

constexpr uint64_t kMaxPromptBytes = uint64_t{64} << 20;
constexpr std::string_view kHalfCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Bytes at the end of `text` that may be the beginning of `stop`.
size_t begun(std::string_view text, std::string_view stop) {
  size_t length = std::min(text.size(), stop.size() - 1);
  while (length > 0 &&
         text.substr(text.size() - length) != stop.substr(0, length)) {
    --length;
  }
  return length;
}

}  // namespace

std::string prompt_from(const std::string& file) {
  std::string prompt;
  if (file == "-") {
    prompt = read_standard_input();
    TS_CHECK_IO(prompt.size() <= kMaxPromptBytes,
                "standard input: the prompt "
                "has ",
                prompt.size(), " bytes; at most ", kMaxPromptBytes,
                " are read.");
  } else {
    prompt = read_file(file, kMaxPromptBytes);
  }
  if (prompt.ends_with('\n')) prompt.pop_back();
  return prompt;
}

GeneratedText::GeneratedText(const data::Tokenizer& tokenizer,
                             std::vector<int64_t> prompt,
                             const std::vector<std::string>& stops)
    : tokenizer_(tokenizer),
      stops_(stops),
      ids_(std::move(prompt)),
      text_(tokenizer.decode(ids_)),
      prompt_size_(text_.size()) {}

bool GeneratedText::add(int64_t id) {
  ids_.push_back(id);
  text_ = tokenizer_.decode(ids_);
  size_t end = std::string::npos;
  for (const auto& stop : stops_) {
    end = std::min(end, text_.find(stop, prompt_size_));
  }
  stopped_ = end != std::string::npos;
  if (stopped_) text_.resize(end);
  return !stopped_;
}

std::string GeneratedText::take() {
  if (text_.ends_with(kHalfCharacter)) return "";
  size_t held = 0;
  const auto written =
      std::string_view(text_).substr(std::min(prompt_size_, text_.size()));
  for (const auto& stop : stops_) held = std::max(held, begun(written, stop));
  return take_up_to(text_.size() - held);
}

std::string GeneratedText::take_rest() { return take_up_to(text_.size()); }

std::string GeneratedText::take_up_to(size_t end) {
  if (end <= taken_) return "";
  const std::string part = text_.substr(taken_, end - taken_);
  taken_ = end;
  return part;
}

}  // namespace tessera::cli
