// UTF-8 as Python's str has it: no surrogates, no overlong forms, nothing
// above U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/core/files.h"

namespace tessera::data::detail {

// Offset of the first byte that is not part of valid UTF-8, or npos.
size_t find_invalid_utf8(std::string_view text);

// A file's bytes, as text.
std::string_view text_of(const MappedFile& file);

// TS_CHECK_IO that names `source`, the first wrong byte and its offset.
void check_utf8(std::string_view text, const std::string& source);

// `bytes` with U+FFFD for each longest piece that cannot be UTF-8.
std::string replace_invalid_utf8(std::string_view bytes);

// The code point at `at`, which moves behind it. REQUIRES: `text` is valid and
// `at` is the start of a code point.
uint32_t next_code_point(std::string_view text, size_t& at);

void append_code_point(std::string& text, uint32_t code_point);

// Normalization form C. REQUIRES: `text` is valid.
std::string normalize_nfc(std::string_view text);

// "0xe9": a byte in a message.
std::string byte_name(uint8_t byte);

}  // namespace tessera::data::detail
