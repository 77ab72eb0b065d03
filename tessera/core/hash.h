// XXH3: a fast hash of bytes, to tell contents apart. Not for secrets.
//
// Source: xxHash 0.8 (github.com/Cyan4973/xxHash); `xxhsum -H3` and `-H2` print
//         the same values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Hash128&) const = default;
};

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed = 0);
uint64_t hash64(std::string_view text, uint64_t seed = 0);
Hash128 hash128(std::span<const std::byte> bytes, uint64_t seed = 0);
Hash128 hash128(std::string_view text, uint64_t seed = 0);

// Lower-case digits, high half first.
std::string to_hex(uint64_t hash);
std::string to_hex(const Hash128& hash);

}  // namespace tessera
