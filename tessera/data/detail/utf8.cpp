#include "tessera/data/detail/utf8.h"

#include <utf8proc.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tessera/core/error.h"

namespace tessera::data::detail {
namespace {

// What a lead byte asks for: the length of its sequence (0: no lead byte) and
// the range of the second byte, which excludes overlong forms, surrogates and
// what lies above U+10FFFF.
struct Lead {
  size_t length = 0;
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xbf;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte >= 0xc2 && byte <= 0xdf) return {2};
  if (byte == 0xe0) return {3, 0xa0, 0xbf};
  if (byte == 0xed) return {3, 0x80, 0x9f};
  if (byte >= 0xe1 && byte <= 0xef) return {3};
  if (byte == 0xf0) return {4, 0x90, 0xbf};
  if (byte >= 0xf1 && byte <= 0xf3) return {4};
  if (byte == 0xf4) return {4, 0x80, 0x8f};
  return {};
}

// How many bytes at `at` are a whole sequence (then `whole`), or else begin
// one.
size_t sequence_at(std::string_view text, size_t at, bool& whole) {
  const Lead lead = lead_of(static_cast<uint8_t>(text[at]));
  size_t length = 1;
  for (; length < lead.length && at + length < text.size(); ++length) {
    const auto byte = static_cast<uint8_t>(text[at + length]);
    const bool fits = length == 1
                          ? byte >= lead.second_min && byte <= lead.second_max
                          : (byte & 0xc0) == 0x80;
    if (!fits) break;
  }
  whole = length == lead.length;
  return length;
}

// The end of the ASCII bytes that begin at `at`.
size_t skip_ascii(std::string_view text, size_t at) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & kHighBits) != 0) break;
  }
  while (at < text.size() && static_cast<uint8_t>(text[at]) < 0x80) ++at;
  return at;
}

// All code points below U+0300 are in form C, whatever their order.
bool is_surely_nfc(std::string_view text) {
  for (const char c : text) {
    if (static_cast<uint8_t>(c) >= 0xcc) return false;
  }
  return true;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = skip_ascii(text, 0); at < text.size();
       at = skip_ascii(text, at)) {
    bool whole = false;
    const size_t length = sequence_at(text, at, whole);
    if (!whole) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()),
          file.bytes().size()};
}

void check_utf8(std::string_view text, const std::string& source) {
  const size_t at = find_invalid_utf8(text);
  if (at == std::string_view::npos) return;
  TS_CHECK_IO(false, source, ": the byte ",
              byte_name(static_cast<uint8_t>(text[at])), " at offset ", at,
              " is not UTF-8. Convert the text, as with iconv -t UTF-8.");
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    bool whole = false;
    const size_t length = sequence_at(bytes, at, whole);
    text.append(whole ? bytes.substr(at, length) : "\xef\xbf\xbd");
    at += length;
  }
  return text;
}

uint32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&] { return static_cast<uint8_t>(text[at++]); };
  const uint32_t lead = byte();
  if (lead < 0x80) return lead;
  const int trailing = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
  uint32_t code_point = lead & (0x3f >> trailing);
  for (int i = 0; i < trailing; ++i) {
    code_point = (code_point << 6) | (byte() & 0x3f);
  }
  return code_point;
}

void append_code_point(std::string& text, uint32_t code_point) {
  const auto trailing = [&](int shift) {
    text += static_cast<char>(0x80 | ((code_point >> shift) & 0x3f));
  };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xc0 | (code_point >> 6));
    trailing(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xe0 | (code_point >> 12));
    trailing(6);
    trailing(0);
  } else {
    text += static_cast<char>(0xf0 | (code_point >> 18));
    trailing(12);
    trailing(6);
    trailing(0);
  }
}

std::string normalize_nfc(std::string_view text) {
  if (is_surely_nfc(text)) return std::string(text);
  utf8proc_uint8_t* normalized = nullptr;
  const auto length = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
      static_cast<utf8proc_ssize_t>(text.size()), &normalized,
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  TS_CHECK(length >= 0, "normalizing ", text.size(),
           " bytes of text failed: ", utf8proc_errmsg(length));
  std::string result(reinterpret_cast<char*>(normalized),
                     static_cast<size_t>(length));
  std::free(normalized);
  return result;
}

std::string byte_name(uint8_t byte) {
  char name[8];
  std::snprintf(name, sizeof(name), "0x%02x", byte);
  return name;
}

}  // namespace tessera::data::detail
