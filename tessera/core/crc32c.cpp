#include "tessera/core/crc32c.h"

#include <array>
#include <cstring>

namespace tessera {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    table[byte] = crc;
  }
  return table;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t
crc_by_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  uint64_t wide = crc;
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    wide = __builtin_ia32_crc32di(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; at < bytes.size(); ++at) {
    narrow = __builtin_ia32_crc32qi(narrow, static_cast<uint8_t>(bytes[at]));
  }
  return narrow;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#else
uint32_t crc_by_instruction(std::span<const std::byte>, uint32_t crc) {
  return crc;
}
bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  if (!has_instruction()) return crc32c_portable(bytes, seed);
  return ~crc_by_instruction(bytes, ~seed);
}

uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t seed) {
  static constexpr std::array<uint32_t, 256> kTable = make_table();
  uint32_t crc = ~seed;
  for (std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  }
  return ~crc;
}

}  // namespace tessera
