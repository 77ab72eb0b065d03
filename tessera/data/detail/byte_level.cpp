#include "tessera/data/detail/byte_level.h"

#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

constexpr uint32_t kFirstSubstitute = 0x100;
constexpr uint32_t kNumSubstitutes = 68;  // bytes that are not printable

bool stands_for_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
         byte >= 0xae;
}

std::array<int, kFirstSubstitute + kNumSubstitutes> make_bytes() {
  std::array<int, kFirstSubstitute + kNumSubstitutes> bytes{};
  bytes.fill(-1);
  for (int byte = 0; byte < 256; ++byte) bytes[byte_alphabet()[byte]] = byte;
  return bytes;
}

}  // namespace

const std::array<uint32_t, 256>& byte_alphabet() {
  static const auto alphabet = [] {
    std::array<uint32_t, 256> code_points{};
    uint32_t substitute = kFirstSubstitute;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      code_points[byte] = stands_for_itself(byte) ? byte : substitute++;
    }
    return code_points;
  }();
  return alphabet;
}

std::string to_byte_level(std::string_view bytes) {
  std::string token;
  for (const char c : bytes) {
    append_code_point(token, byte_alphabet()[static_cast<uint8_t>(c)]);
  }
  return token;
}

std::optional<std::string> from_byte_level(std::string_view token) {
  static const auto bytes = make_bytes();
  std::string result;
  for (size_t at = 0; at < token.size();) {
    const uint32_t code_point = next_code_point(token, at);
    if (code_point >= bytes.size() || bytes[code_point] < 0) return {};
    result += static_cast<char>(bytes[code_point]);
  }
  return result;
}

}  // namespace tessera::data::detail
