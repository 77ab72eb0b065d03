#include "tessera/core/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

uint64_t hash64(std::string_view text, uint64_t seed) {
  return hash64(std::as_bytes(std::span(text)), seed);
}

Hash128 hash128(std::span<const std::byte> bytes, uint64_t seed) {
  const auto hash = XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed);
  return {.low = hash.low64, .high = hash.high64};
}

Hash128 hash128(std::string_view text, uint64_t seed) {
  return hash128(std::as_bytes(std::span(text)), seed);
}

std::string to_hex(uint64_t hash) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t at = text.size(); at-- > 0; hash >>= 4) {
    text[at] = kDigits[hash & 15];
  }
  return text;
}

std::string to_hex(const Hash128& hash) {
  return to_hex(hash.high) + to_hex(hash.low);
}

}  // namespace tessera
