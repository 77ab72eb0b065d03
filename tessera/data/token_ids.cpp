#include "tessera/data/token_ids.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

template <typename T>
T load(const std::byte* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Calls visitor(T{}) with the type of the ids.
template <typename Visitor>
auto with_type(IdType type, const Visitor& visitor) {
  switch (type) {
    case IdType::kU8:
      return visitor(uint8_t{});
    case IdType::kU16:
      return visitor(uint16_t{});
    case IdType::kI16:
      return visitor(int16_t{});
    case IdType::kU32:
      return visitor(uint32_t{});
    case IdType::kI32:
      return visitor(int32_t{});
    case IdType::kI64:
      return visitor(int64_t{});
  }
  TORCH_INTERNAL_ASSERT(false, "id type");
}

// Seen as unsigned, a negative id is too large.
template <typename T>
int64_t find_above(const std::byte* data, int64_t first, int64_t end,
                   uint64_t last) {
  using Unsigned = std::make_unsigned_t<T>;
  constexpr int64_t kBlock = 4096;
  last = std::min<uint64_t>(last, std::numeric_limits<T>::max());
  for (int64_t begin = first; begin < end; begin += kBlock) {
    const int64_t size = std::min(kBlock, end - begin);
    Unsigned largest = 0;
    for (int64_t i = 0; i < size; ++i) {
      largest = std::max(largest, load<Unsigned>(data, begin + i));
    }
    if (largest <= last) continue;
    for (int64_t i = begin;; ++i) {
      if (load<Unsigned>(data, i) > last) return i;
    }
  }
  return -1;
}

}  // namespace

int64_t width_of(IdType type) {
  return with_type(type,
                   [](auto id) { return static_cast<int64_t>(sizeof(id)); });
}

int64_t TokenIds::at(int64_t i) const {
  return with_type(type, [&](auto id) {
    return static_cast<int64_t>(load<decltype(id)>(data, i));
  });
}

void TokenIds::read(int64_t first, std::span<int64_t> out) const {
  with_type(type, [&](auto id) {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = load<decltype(id)>(data, first + static_cast<int64_t>(i));
    }
  });
}

int64_t TokenIds::find_outside(int64_t first, int64_t n,
                               int64_t vocab_size) const {
  return with_type(type, [&](auto id) {
    return find_above<decltype(id)>(data, first, first + n,
                                    static_cast<uint64_t>(vocab_size - 1));
  });
}

}  // namespace tessera::data
