#include "tessera/core/printable.h"

#include <cstdint>
#include <cstdio>

namespace tessera {
namespace {

// The bytes of the well-formed character at the front; 0: there is none.
size_t length_of_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const uint8_t second = byte(1);
  const bool overlong =
      (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool beyond = (first == 0xed && second > 0x9f) ||  // a surrogate
                      (first == 0xf4 && second > 0x8f);
  return overlong || beyond ? 0 : length;
}

uint32_t code_of(std::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 1) return first;
  uint32_t code = first & (0x7fU >> character.size());
  for (const char next : character.substr(1)) {
    code = (code << 6) | (static_cast<uint8_t>(next) & 0x3fU);
  }
  return code;
}

bool acts_on_terminal(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) ||
         (code >= 0x200e && code <= 0x200f) ||
         (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

std::string printable(std::string_view text, bool keeps_lines) {
  std::string shown;
  shown.reserve(text.size());
  const auto escape = [&](const char* form, uint32_t code) {
    char letters[8];
    std::snprintf(letters, sizeof letters, form, static_cast<unsigned>(code));
    shown += letters;
  };
  while (!text.empty()) {
    const size_t length = length_of_character(text);
    if (length == 0) {
      escape("\\x%02x", static_cast<uint8_t>(text[0]));
      text.remove_prefix(1);
      continue;
    }
    const std::string_view character = text.substr(0, length);
    const uint32_t code = code_of(character);
    const bool is_line = code == '\n' || code == '\t';
    if (acts_on_terminal(code) && !(keeps_lines && is_line)) {
      escape("\\u%04x", code);
    } else {
      shown += character;
    }
    text.remove_prefix(length);
  }
  return shown;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = length_of_character(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace tessera
