#include "tessera/core/hash.h"

#include <gtest/gtest.h>

#include <vector>

#include "tessera/core/crc32c.h"

namespace tessera {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// As `xxhsum -H3` and `xxhsum -H2` print them.
TEST(Hash, KnownAnswers) {
  EXPECT_EQ(to_hex(hash64("")), "2d06800538d394c2");
  EXPECT_EQ(to_hex(hash128("")), "99aa06d3014798d86001c324468d497f");
  EXPECT_NE(hash64("abc"), hash64("abx"));
  EXPECT_NE(hash64("abc"), hash64("abc", 1));
  EXPECT_EQ(hash64("abc"), hash64(bytes_of("abc")));
  EXPECT_EQ(hash128("abc"), hash128(bytes_of("abc")));
}

// RFC 3720, B.4.
TEST(Crc32c, KnownAnswers) {
  std::vector<std::byte> zeros(32), ones(32, std::byte{0xff}), counting(32);
  for (size_t i = 0; i < 32; ++i) counting[i] = static_cast<std::byte>(i);
  for (auto* crc : {&crc32c, &crc32c_portable}) {
    EXPECT_EQ(crc(bytes_of(""), 0), 0);
    EXPECT_EQ(crc(bytes_of("123456789"), 0), 0xe3069283);
    EXPECT_EQ(crc(zeros, 0), 0x8a9136aa);
    EXPECT_EQ(crc(ones, 0), 0x62a8ab43);
    EXPECT_EQ(crc(counting, 0), 0x46dd794e);
  }
}

TEST(Crc32c, BothWaysAgreeAtEverySizeAndAlignment) {
  std::vector<std::byte> data(300);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(i * 131 + 7);
  }
  const std::span<const std::byte> all(data);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t size = 0; begin + size <= data.size(); ++size) {
      const auto part = all.subspan(begin, size);
      ASSERT_EQ(crc32c(part), crc32c_portable(part));
    }
  }
}

TEST(Crc32c, PartsMakeTheWhole) {
  std::vector<std::byte> data(1000);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(i * i);
  }
  const std::span<const std::byte> all(data);
  for (size_t cut = 0; cut <= data.size(); cut += 37) {
    const uint32_t before = crc32c(all.first(cut));
    EXPECT_EQ(crc32c(all.subspan(cut), before), crc32c(all));
  }
}

}  // namespace
}  // namespace tessera
