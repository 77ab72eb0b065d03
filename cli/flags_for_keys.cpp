#include "cli/flags_for_keys.h"

#include <cctype>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

bool is_of_word(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 ||
         letter == '_' || letter == '.' || letter == '/' || letter == '-';
}

// Whole words alone: a path may have such a part.
std::string replaced(const std::string& text, const std::string& word,
                     const std::string& by) {
  std::string out;
  size_t from = 0;
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos;) {
    const size_t end = at + word.size();
    const bool ends = end == text.size() || !is_of_word(text[end]) ||
                      (text[end] == '.' &&
                       (end + 1 == text.size() || !is_of_word(text[end + 1])));
    size_t begin = at;
    if (begin >= 2 && text.compare(begin - 2, 2, "--") == 0) begin -= 2;
    if (ends && (begin == 0 || !is_of_word(text[begin - 1]))) {
      out += text.substr(from, begin - from) + by;
      from = end;
    }
    at = end;
  }
  return out + text.substr(from);
}

}  // namespace

void with_flags_for(
    const std::vector<std::pair<std::string, std::string>>& flags_of_keys,
    const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    std::string text = message_of(error);
    for (const auto& [key, flag] : flags_of_keys) {
      text = replaced(text, key, flag);
    }
    if (text == message_of(error)) throw;
    detail::throw_error(error.exit_code(), text,
                        {__func__, __FILE__, uint32_t{__LINE__}});
  }
}

}  // namespace tessera::cli
