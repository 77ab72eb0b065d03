#include "tessera/core/units.h"

#include <gtest/gtest.h>

#include "tessera/core/edit_distance.h"

namespace tessera {
namespace {

TEST(Units, Bytes) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1024), "1.0 KiB");
  EXPECT_EQ(bytes_text(1536), "1.5 KiB");
  EXPECT_EQ(bytes_text((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(bytes_text(uint64_t{20} << 30), "20.0 GiB");
  EXPECT_EQ(bytes_text(~uint64_t{0}), "16.0 EiB");
}

TEST(Units, ReadsBytes) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("512B"), 512);
  EXPECT_EQ(parse_bytes("4K"), 4096);
  EXPECT_EQ(parse_bytes("64KiB"), 65536);
  EXPECT_EQ(parse_bytes("3m"), int64_t{3} << 20);
  EXPECT_EQ(parse_bytes("2G"), int64_t{2} << 30);
  EXPECT_EQ(parse_bytes("8388607T"), int64_t{8388607} << 40);
  for (const char* wrong : {"", "K", "-1", "4 K", "4KB", "1.5M", "4KK", "iB",
                            "8388608T", "99999999999999999999"}) {
    EXPECT_EQ(parse_bytes(wrong), std::nullopt) << wrong;
  }
}

TEST(Units, SomeOf) {
  EXPECT_EQ(some_of({}, 2), "");
  EXPECT_EQ(some_of({"a", "b"}, 2), "a, b");
  EXPECT_EQ(some_of({"a", "b", "c", "d"}, 2), "a, b and 2 more");
}

TEST(Units, Counts) {
  EXPECT_EQ(count_text(0), "0");
  EXPECT_EQ(count_text(999), "999");
  EXPECT_EQ(count_text(1000), "1.00K");
  EXPECT_EQ(count_text(12500), "12.5K");
  EXPECT_EQ(count_text(10.2e6), "10.2M");
  EXPECT_EQ(count_text(123e6), "123M");
  EXPECT_EQ(count_text(999.7e6), "1.00B");
  EXPECT_EQ(count_text(1.76e9), "1.76B");
  EXPECT_EQ(count_text(15e12), "15.0T");
  EXPECT_EQ(count_text(4e15), "4000T");
}

TEST(Units, Seconds) {
  EXPECT_EQ(seconds_text(0), "0us");
  EXPECT_EQ(seconds_text(350e-6), "350us");
  EXPECT_EQ(seconds_text(0.9999e-3), "1.0ms");
  EXPECT_EQ(seconds_text(12.5e-3), "12.5ms");
  EXPECT_EQ(seconds_text(0.25), "250ms");
  EXPECT_EQ(seconds_text(3.2), "3.2s");
  EXPECT_EQ(seconds_text(59.96), "1m00s");
  EXPECT_EQ(seconds_text(245), "4m05s");
  EXPECT_EQ(seconds_text(3599.7), "1h00m");
  EXPECT_EQ(seconds_text(7380), "2h03m");
  EXPECT_EQ(seconds_text(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(seconds_text(-3.2), "-3.2s");
}

TEST(Units, NearestFitting) {
  const auto divides = [](int64_t n) { return 12 % n == 0; };
  EXPECT_EQ(nearest_fitting(5, 12, divides), "4 or 6");
  EXPECT_EQ(nearest_fitting(100, 12, divides), "12");
  EXPECT_EQ(nearest_fitting(2, 12, [](int64_t n) { return n == 12; }), "12");
  EXPECT_EQ(nearest_fitting(2, 1, divides), "1");
}

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("hidden", "hiddn"), 1);
  EXPECT_EQ(edit_distance("hidden", "hiddne"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("lr", "lr"), 0);
}

}  // namespace
}  // namespace tessera
