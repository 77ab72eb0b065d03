// The printable alphabet in which byte-level BPE writes bytes (GPT-2's
// encoder.py): a byte that is a printable Latin-1 character stands for itself,
// the others for U+0100 and onwards, in order.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::data::detail {

// The 256 code points, by byte.
const std::array<uint32_t, 256>& byte_alphabet();

std::string to_byte_level(std::string_view bytes);

// The bytes that `token` stands for, or nothing when it has a character outside
// the alphabet. REQUIRES: `token` is valid UTF-8.
std::optional<std::string> from_byte_level(std::string_view token);

}  // namespace tessera::data::detail
