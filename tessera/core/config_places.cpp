#include "tessera/core/config_places.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cctype>
#include <vector>

namespace tessera::config {
namespace {

bool is_of_key(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_';
}

// Not as a part of a longer key, which "mesh.dp" is of "mesh.dp_shard"; a
// sentence may end with it.
bool is_key_at(const std::string& text, size_t at, size_t size) {
  const size_t end = at + size;
  const bool begins = at == 0 || (!is_of_key(text[at - 1]) &&
                                  text[at - 1] != '.' && text[at - 1] != '-');
  const bool goes_on =
      end < text.size() &&
      (is_of_key(text[end]) ||
       (text[end] == '.' && end + 1 < text.size() && is_of_key(text[end + 1])));
  return begins && !goes_on;
}

bool names(const std::string& text, const std::string& key) {
  for (size_t at = text.find(key); at != text.npos;
       at = text.find(key, at + 1)) {
    if (is_key_at(text, at, key.size())) return true;
  }
  return false;
}

size_t behind_number(const std::string& text, size_t at) {
  while (at < text.size() &&
         std::isdigit(static_cast<unsigned char>(text[at])) != 0) {
    ++at;
  }
  return at;
}

// Whether ":LINE:COLUMN: " stands there.
bool is_place_at(const std::string& text, size_t at) {
  const size_t line = behind_number(text, at + 1);
  if (line == at + 1 || text.compare(line, 1, ":") != 0) return false;
  const size_t column = behind_number(text, line + 1);
  return column > line + 1 && text.compare(column, 2, ": ") == 0;
}

// The message up to the first "FILE:LINE:COLUMN: " of a file that gave no key.
std::string about_given_keys(const std::string& message,
                             const Provenance& provenance) {
  for (size_t at = message.find(':'); at != message.npos;
       at = message.find(':', at + 1)) {
    if (!is_place_at(message, at)) continue;
    const size_t blank = message.find_last_of(" \n", at);
    const size_t begin = blank == message.npos ? 0 : blank + 1;
    const std::string file = message.substr(begin, at + 1 - begin);
    const bool gave_one = std::ranges::any_of(provenance, [&](const auto& key) {
      return key.second.find(file) != key.second.npos;
    });
    if (!gave_one) return message.substr(0, begin);
  }
  return message;
}

}  // namespace

std::string with_places(const std::string& message,
                        const Provenance& provenance) {
  const std::string text = about_given_keys(message, provenance);
  std::vector<std::string> places;
  for (const auto& [key, origin] : provenance) {
    if (origin == "default" || message.find(origin) != message.npos) continue;
    if (names(text, key)) places.push_back(key + ": " + origin);
  }
  return places.empty() ? message
                        : c10::str(message, " (", c10::Join("; ", places), ")");
}

}  // namespace tessera::config
