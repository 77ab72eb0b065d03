// Ids that lie in memory one after another, little-endian, of whatever width.
//
// TokenIds does not own them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera::data {

enum class IdType { kU8, kU16, kI16, kU32, kI32, kI64 };

int64_t width_of(IdType type);  // bytes

struct TokenIds {
  const std::byte* data = nullptr;
  IdType type = IdType::kU16;
  int64_t count = 0;

  int64_t at(int64_t i) const;
  void read(int64_t first, std::span<int64_t> out) const;
  // The first of the ids [first, first + n) that is not in [0, vocab_size), or
  // -1. Also ids that are negative are found.
  int64_t find_outside(int64_t first, int64_t n, int64_t vocab_size) const;
};

}  // namespace tessera::data
