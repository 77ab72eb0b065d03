#include "tessera/core/printable.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Printable, LeavesTextAsItIs) {
  for (const char* text : {"", "blocks.0.weight",
                           "\xc3\xbc"
                           "ber \xe4\xb8\xad",
                           "a \\ b"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, EscapesWhatATerminalObeys) {
  EXPECT_EQ(printable("a\x1b[2Jb"), "a\\u001b[2Jb");
  EXPECT_EQ(printable(std::string_view("\0\x7f", 2)), "\\u0000\\u007f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\u009b31m");  // one-byte CSI
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "gnp"),
            "\\u202egnp");
  EXPECT_EQ(printable("a\nb\tc\r"), "a\\u000ab\\u0009c\\u000d");
  EXPECT_EQ(printable("a\nb\tc\r", /*keeps_lines=*/true), "a\nb\tc\\u000d");
}

TEST(Printable, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("\x9b"
                      "31m"),
            "\\x9b31m");
  EXPECT_EQ(printable("\xc3"), "\\xc3");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
}

TEST(Printable, KnowsUtf8) {
  for (const char* text : {"", "a\n", "\xc3\xa9", "\xe2\x82\xac\x1b"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  for (const char* text : {"\xe9", "a\xc3", "\xed\xa0\x80"}) {
    EXPECT_FALSE(is_utf8(text)) << printable(text);
  }
}

}  // namespace
}  // namespace tessera
