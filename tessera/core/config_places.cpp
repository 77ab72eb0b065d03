#include "tessera/core/config_places.h"

#include <c10/util/StringUtil.h>

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

}  // namespace

std::string with_places(const std::string& message,
                        const Provenance& provenance) {
  std::vector<std::string> places;
  for (const auto& [key, origin] : provenance) {
    if (origin == "default" || message.find(origin) != message.npos) continue;
    if (names(message, key)) places.push_back(key + ": " + origin);
  }
  return places.empty() ? message
                        : c10::str(message, " (", c10::Join("; ", places), ")");
}

}  // namespace tessera::config
