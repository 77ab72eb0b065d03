#include "tessera/benchmark/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::benchmark {
namespace {

using comm::algorithms::Algorithm;
using comm::algorithms::TuningTable;
using ::testing::IsEmpty;

Cell cell(const std::string& backend, const std::string& algorithm,
          double time_us) {
  Cell cell;
  cell.series = {.backend = backend, .algorithm = algorithm};
  cell.time_us = time_us;
  cell.wrong = 0;
  return cell;
}

Row row(Operation operation, int64_t bytes, std::vector<Cell> cells) {
  Row row;
  row.what.operation = operation;
  row.ranks = 4;
  row.bytes = bytes;
  row.cells = std::move(cells);
  return row;
}

Algorithm chosen(const TuningTable& table, int64_t bytes) {
  return table.algorithm_for(comm::Verb::kAllReduce, "gloo", 4, bytes);
}

TEST(BenchTune, TheFastestOfEachRange) {
  const auto timed = [](int64_t bytes, double own, double ring, double tree) {
    return row(Operation::kAllReduce, bytes,
               {cell("gloo", "auto", own), cell("gloo", "ring", ring),
                cell("gloo", "tree", tree)});
  };
  const TuningTable table =
      tuning_table({timed(1024, 100, 90, 50), timed(4096, 100, 90, 60),
                    timed(65536, 100, 120, 110), timed(1 << 20, 100, 70, 110)},
                   "a machine");
  ASSERT_EQ(table.entries().size(), 2);  // neighbours that agree are one
  EXPECT_EQ(chosen(table, 0), Algorithm::kTree);
  EXPECT_EQ(chosen(table, 16383), Algorithm::kTree);
  EXPECT_EQ(chosen(table, 16384), Algorithm::kOwn);  // sqrt(4 Ki * 64 Ki)
  EXPECT_EQ(chosen(table, 262143), Algorithm::kOwn);
  EXPECT_EQ(chosen(table, 262144), Algorithm::kRing);
  EXPECT_EQ(chosen(table, int64_t{1} << 40), Algorithm::kRing);
  EXPECT_EQ(TuningTable::parse(table.to_json(), "t").entries(),
            table.entries());
}

// As sizes below one element a rank are.
TEST(BenchTune, RowsOfOneSizeAreOne) {
  const auto timed = [](int64_t bytes, double ring, double tree) {
    return row(Operation::kAllReduce, bytes,
               {cell("gloo", "auto", 100), cell("gloo", "ring", ring),
                cell("gloo", "tree", tree)});
  };
  const TuningTable table =
      tuning_table({timed(16, 50, 90), timed(16, 90, 50), timed(16, 100, 100),
                    timed(64, 90, 50)},
                   "a machine");
  EXPECT_EQ(chosen(table, 16), Algorithm::kRing);
  EXPECT_EQ(chosen(table, 64), Algorithm::kTree);
  EXPECT_EQ(TuningTable::parse(table.to_json(), "t").entries(),
            table.entries());
}

TEST(BenchTune, NoiseAndWrongResultsChangeNothing) {
  Row close = row(Operation::kAllReduce, 1024,
                  {cell("gloo", "auto", 100), cell("gloo", "ring", 96)});
  EXPECT_THAT(tuning_table({close}, "").entries(), IsEmpty());
  Row wrong = row(Operation::kAllReduce, 1024,
                  {cell("gloo", "auto", 100), cell("gloo", "ring", 10)});
  wrong.cells[1].wrong = 1;
  EXPECT_THAT(tuning_table({wrong}, "").entries(), IsEmpty());
}

TEST(BenchTune, BackendsAndOperationsAreApart) {
  const TuningTable table =
      tuning_table({row(Operation::kAllReduce, 1024,
                        {cell("shm", "auto", 1), cell("shm", "ring", 5),
                         cell("gloo", "auto", 100), cell("gloo", "ring", 5)}),
                    row(Operation::kAllGather, 1024,
                        {cell("shm", "auto", 9), cell("shm", "ring", 5)}),
                    row(Operation::kBarrier, 0, {cell("shm", "auto", 9)})},
                   "");
  ASSERT_EQ(table.entries().size(), 2);
  EXPECT_EQ(chosen(table, 1024), Algorithm::kRing);
  EXPECT_EQ(table.algorithm_for(comm::Verb::kAllReduce, "shm", 4, 1024),
            Algorithm::kOwn);
  EXPECT_EQ(table.algorithm_for(comm::Verb::kAllGather, "shm", 4, 1024),
            Algorithm::kRing);
}

// 4 ranks on 2 hosts: of the bytes of a rank half are for a rank from a host.
TEST(BenchTune, AllToAllHasTheFasterFormBetweenHosts) {
  const auto timed = [](int64_t bytes, double straight, double aggregated) {
    return row(Operation::kAllToAll, bytes,
               {cell("gloo", "straight", straight),
                cell("gloo", "aggregated", aggregated)});
  };
  const TuningTable table = tuning_table(
      {timed(1024, 100, 60), timed(4096, 100, 99), timed(65536, 100, 101)},
      "a machine", /*hosts=*/2);
  ASSERT_EQ(table.entries().size(), 2);
  const auto form = [&](int64_t bytes) {
    return table.algorithm_for(comm::Verb::kAllToAll, "gloo", 2, bytes);
  };
  EXPECT_EQ(form(0), Algorithm::kAggregated);
  EXPECT_EQ(form(8191), Algorithm::kAggregated);  // sqrt(2 Ki * 32 Ki)
  EXPECT_EQ(form(8192), Algorithm::kStraight);
  EXPECT_EQ(TuningTable::parse(table.to_json(), "t").entries(),
            table.entries());
}

TEST(BenchTune, ASeriesServesWhatItsAlgorithmHas) {
  const Series ring{.backend = "gloo", .algorithm = "ring"};
  EXPECT_EQ(ring.name(), "gloo:ring");
  EXPECT_EQ(Series{.backend = "shm"}.name(), "shm");
  const Series registered{
      .backend = "shm", .algorithm = "auto", .registered = true};
  EXPECT_EQ(registered.name(), "shm+registered");
  EXPECT_TRUE(ring.serves(Operation::kAllReduce));
  EXPECT_FALSE(ring.serves(Operation::kBroadcast));
  EXPECT_FALSE(ring.serves(Operation::kAllToAll));
  const Series straight{.backend = "gloo", .algorithm = "straight"};
  EXPECT_TRUE(straight.serves(Operation::kAllToAll));
  EXPECT_FALSE(straight.serves(Operation::kAllReduce));
  EXPECT_TRUE(Series{.backend = "gloo"}.serves(Operation::kAllToAll));
}

}  // namespace
}  // namespace tessera::benchmark
