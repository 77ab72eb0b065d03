#include "tessera/benchmark/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/benchmark/plot.h"
#include "tessera/core/detail/json.h"

namespace tessera::benchmark {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Cell cell(const std::string& series, double time_us, int64_t wrong) {
  Cell cell;
  cell.series = {.backend = series};
  cell.time_us = time_us;
  cell.wrong = wrong;
  return cell;
}

Row row(Operation operation, int64_t bytes, std::vector<Cell> cells) {
  Row row;
  row.what = {operation, at::kFloat, comm::ReduceOp::kSum, bytes};
  row.ranks = 2;
  row.counts = counts_of(operation, bytes, 4, 2);
  row.bytes = row.counts.size * 4;
  row.trip_before_ns = 105.4;
  row.trip_after_ns = bytes > 5000 ? 470.0 : 107.0;
  row.cells = std::move(cells);
  return row;
}

TEST(BenchReport, TableHasTheColumnsOfNcclTests) {
  const std::vector<Row> rows = {
      row(Operation::kAllReduce, 4096, {cell("shm", 1.024, 0)}),
      row(Operation::kAllReduce, 1 << 20, {cell("shm", 104.8576, 3)})};
  EXPECT_EQ(tables(rows),
            "\n"
            "# all_reduce, shm\n"
            "#  size(B)   count  type  redop  root  time(us)  algbw(GB/s)  busb"
            "w(GB/s)  #wrong  line(ns)    state\n"
            "      4096    1024  fp32    sum    -1      1.02         4.00      "
            "   4.00       0   105/107     near\n"
            "   1048576  262144  fp32    sum    -1    104.86        10.00      "
            "  10.00       3   105/470  changed\n");
  EXPECT_EQ(wrong_in(rows), 3);
}

TEST(BenchReport, SeveralBackendsStandSideBySide) {
  const std::vector<Row> rows = {row(
      Operation::kAllGather, 4096, {cell("shm", 2, 0), cell("gloo", 300, 0)})};
  EXPECT_THAT(
      tables(rows),
      HasSubstr(
          "\n"
          "# all_gather, side by side\n"
          "#  size(B)  type  redop  shm(us)  busbw  gloo(us)  busbw  gloo/shm"
          "  line(ns)  state\n"
          "      4096  fp32   none     2.00   1.02    300.00   0.01    150.00"
          "   105/107   near\n"));
}

TEST(BenchReport, ABarrierHasATimeAlone) {
  Row barrier = row(Operation::kBarrier, 0, {cell("shm", 0.5, 0)});
  barrier.cells[0].wrong = std::nullopt;
  barrier.trip_before_ns = std::nullopt;
  EXPECT_EQ(tables({barrier}),
            "\n"
            "# barrier, shm\n"
            "#  size(B)  count  type  redop  root  time(us)  algbw(GB/s)  busbw"
            "(GB/s)  #wrong  line(ns)    state\n"
            "         0      0  none   none    -1      0.50            -       "
            "     -     N/A     -/107  unknown\n");
}

TEST(BenchReport, States) {
  EXPECT_STREQ(state_of(105, 110), "near");
  EXPECT_STREQ(state_of(450, 490), "far");
  EXPECT_STREQ(state_of(105, 489), "changed");
  EXPECT_STREQ(state_of(489, 105), "changed");
  EXPECT_STREQ(state_of(std::nullopt, 105), "unknown");
}

TEST(BenchReport, JsonHasEveryFigure) {
  const Circumstances around{.command = "tessera bench comm",
                             .host = "h",
                             .processor = "p",
                             .cores = 2,
                             .ranks = 2,
                             .ranks_are = "processes",
                             .build = "b"};
  const auto read = tessera::detail::parse_json(
      json(around, {row(Operation::kBroadcast, 4096,
                        {cell("shm", 4.096, 0), cell("gloo", 8.192, 1)}),
                    row(Operation::kBarrier, 0, {cell("shm", 1, 0)})}),
      "json");
  EXPECT_EQ(read["ranks_are"], "processes");
  ASSERT_EQ(read["cells"].size(), 3);
  const auto& gloo = read["cells"][1];
  EXPECT_EQ(gloo["operation"], "broadcast");
  EXPECT_EQ(gloo["backend"], "gloo");
  EXPECT_EQ(gloo["root"], 0);
  EXPECT_EQ(gloo["wrong"], 1);
  EXPECT_DOUBLE_EQ(gloo["algbw_gbps"].get<double>(), 0.5);
  EXPECT_DOUBLE_EQ(gloo["ratio_to_first"].get<double>(), 2);
  EXPECT_DOUBLE_EQ(gloo["line_ns_before"].get<double>(), 105.4);
  EXPECT_TRUE(read["cells"][2]["busbw_gbps"].is_null());
}

TEST(BenchPlot, HasAPanelAnOperationAndALineASeries) {
  const std::vector<Cell> cells = {cell("shm", 2, 0), cell("gloo", 300, 0)};
  const std::string svg = plot({row(Operation::kAllReduce, 4096, cells),
                                row(Operation::kAllReduce, 16384, cells),
                                row(Operation::kAllGather, 4096, cells),
                                row(Operation::kBarrier, 0, cells)},
                               Plotted::kTime, "a & b");
  const auto count = [&](const std::string& part) {
    size_t found = 0;
    for (size_t at = svg.find(part); at != svg.npos;
         at = svg.find(part, at + 1)) {
      ++found;
    }
    return found;
  };
  EXPECT_EQ(count("<g "), 2);
  EXPECT_EQ(count("<polyline "), 4);
  EXPECT_EQ(count(">gloo</text>"), 1);
  EXPECT_THAT(svg, HasSubstr("a &amp; b: time (us)"));
  EXPECT_THAT(svg, HasSubstr(">16K</text>"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf\"")));
}

TEST(BenchPlot, OfNothingIsADrawing) {
  EXPECT_THAT(plot({}, Plotted::kBusBandwidth, "t"), HasSubstr("</svg>"));
}

}  // namespace
}  // namespace tessera::benchmark
