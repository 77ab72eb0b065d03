#include "tessera/monitor/report/drawing.h"

#include <gtest/gtest.h>

namespace tessera::monitor::report {
namespace {

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

Drawing two_rows() {
  Drawing drawing{.unit = "s"};
  drawing.panels.push_back(
      {.title = "predicted <1>",
       .rows = {{.label = "rank 0",
                 .boxes = {{0, 2, BoxKind::kForward, 0, 0},
                           {2, 4, BoxKind::kForward, 1, 1},
                           {8, 10, BoxKind::kBackward, 1, 1}},
                 .note = "bubble 40 %"},
                {.label = "rank 1",
                 .boxes = {{4, 4.01, BoxKind::kOther, 77, 0}},
                 .note = ""}}});
  return drawing;
}

TEST(Drawing, InATerminalLettersTellKinds) {
  // 20 columns of time: two a unit.
  const std::string text = text_of(two_rows(), 0, /*colours=*/false);
  EXPECT_TRUE(has(text, "rank 0 |F0--f1--........b1--| bubble 40 %")) << text;
  // What is too short for a column is left out.
  EXPECT_TRUE(has(text, "rank 1 |....................| ")) << text;
  EXPECT_TRUE(has(text, "F forward  B backward"));
  EXPECT_TRUE(has(text, "small letters"));
  EXPECT_TRUE(
      has(text, "\ndigits: micro-batch  -: the same goes on  .: bubble\n"));
  EXPECT_FALSE(has(text, "\x1b"));
}

TEST(Drawing, InATerminalWithColours) {
  const std::string text = text_of(two_rows(), 0, /*colours=*/true);
  EXPECT_TRUE(has(text, "\x1b[48;5;25;38;5;231m0   \x1b[0m")) << text;
  EXPECT_TRUE(has(text, ";4m1   \x1b[0m"));  // of the second chunk
  EXPECT_TRUE(has(text, "\nnumbers: micro-batches  blank: bubble\n"));
}

TEST(Drawing, AsSvg) {
  const std::string svg = svg_of(two_rows());
  EXPECT_TRUE(svg.starts_with("<svg xmlns="));
  EXPECT_TRUE(has(svg, "predicted &lt;1&gt;"));
  EXPECT_TRUE(has(svg, "backward of micro-batch 1, chunk 1: 8 to 10 s"));
  EXPECT_TRUE(has(svg, "#0072b2"));
  EXPECT_TRUE(has(svg, "second chunk"));
  EXPECT_TRUE(has(svg, "bubble 40 %"));
  // A number that has no room is left out.
  EXPECT_FALSE(has(svg, ">77</text>"));
}

TEST(Drawing, OfNothing) {
  EXPECT_TRUE(svg_of({}).ends_with("</svg>\n"));
  EXPECT_EQ(text_of({}, 80, false), "\n");
}

}  // namespace
}  // namespace tessera::monitor::report
