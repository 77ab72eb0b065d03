#include "tessera/benchmark/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::benchmark {
namespace {

using ::testing::ElementsAre;

TEST(BenchMeasure, SizesGrowByAFactor) {
  EXPECT_THAT(sizes_between(4096, 65536, 4), ElementsAre(4096, 16384, 65536));
  EXPECT_THAT(sizes_between(3, 20, 2), ElementsAre(3, 6, 12));
  EXPECT_THAT(sizes_between(5, 5, 1000), ElementsAre(5));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_THAT(sizes_between(huge, huge, 4), ElementsAre(huge));
}

TEST(BenchMeasure, Bandwidths) {
  Row row;
  row.what.operation = Operation::kAllReduce;
  row.ranks = 4;
  row.bytes = 3'000'000;
  Cell cell;
  cell.time_us = 1000;
  EXPECT_DOUBLE_EQ(row.algbw(cell), 3.0);
  EXPECT_DOUBLE_EQ(row.busbw(cell), 4.5);
}

// Every rank's rows, as rank 0 has them.
std::vector<Row> rows_of(const Plan& plan, int64_t world_size) {
  std::vector<Row> all;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  comm::run_threads(world_size, "shm", [&](comm::Communicator& control) {
    const Ranks ranks{
        .control = control, .make = [&](const auto& series) {
          return comm::make_communicator({.backend = series.backend,
                                          .algorithm = series.algorithm,
                                          .rank = control.rank(),
                                          .world_size = world_size,
                                          .local_world_size = world_size,
                                          .store = store});
        }};
    measure(plan, ranks, [&](const std::vector<Row>& rows) {
      if (control.rank() != 0) return;
      all.insert(all.end(), rows.begin(), rows.end());
    });
  });
  return all;
}

TEST(BenchMeasure, EveryCellOfThePlan) {
  Plan plan;
  plan.series = {{"shm"}, {"gloo"}};
  plan.operations = {Operation::kAllReduce, Operation::kAllGather,
                     Operation::kBarrier};
  plan.dtypes = {at::kFloat, at::kInt};
  plan.redops = {comm::ReduceOp::kSum, comm::ReduceOp::kMax};
  plan.sizes = {100'000, 400'000};  // few calls a timing
  plan.timings = 3;
  plan.warmup = 1;
  const std::vector<Row> rows = rows_of(plan, 2);
  ASSERT_EQ(rows.size(), 2 * 2 * 2 + 2 * 2 + 1);
  for (const Row& row : rows) {
    ASSERT_EQ(row.cells.size(), 2);
    EXPECT_EQ(row.cells[0].series.name(), "shm");
    EXPECT_EQ(row.cells[1].series.name(), "gloo");
    for (const Cell& cell : row.cells) {
      EXPECT_EQ(cell.wrong, 0) << name_of(row.what.operation);
      EXPECT_EQ(cell.timings, 3);
      EXPECT_GT(cell.best_us, 0);
      EXPECT_LE(cell.best_us, cell.time_us);
      EXPECT_LE(cell.min_rank_us, cell.time_us * 1.000001);
      EXPECT_LE(cell.time_us, cell.max_rank_us * 1.000001);
    }
  }
  EXPECT_EQ(rows[0].bytes, 100'000);
  EXPECT_EQ(rows.back().what.operation, Operation::kBarrier);
}

TEST(BenchMeasure, RegisteredBuffersStandBesidePlainOnes) {
  Plan plan;
  plan.series = {{"shm"}, {"shm", "auto", /*registered=*/true}};
  plan.sizes = {400'000};
  plan.timings = 2;
  for (const Row& row : rows_of(plan, 3)) {
    ASSERT_EQ(row.cells.size(), 2);
    EXPECT_EQ(row.cells[1].series.name(), "shm+registered");
    EXPECT_EQ(row.cells[1].wrong, 0) << name_of(row.what.operation);
  }
}

TEST(BenchMeasure, AlgorithmsAreMeasuredForWhatTheyHave) {
  Plan plan;
  plan.series = {{"shm"}, {"shm", "tree"}};
  plan.operations = {Operation::kAllReduce, Operation::kAllGather};
  plan.sizes = {400'000};
  plan.timings = 1;
  const std::vector<Row> rows = rows_of(plan, 3);
  ASSERT_EQ(rows.size(), 2);
  ASSERT_EQ(rows[0].cells.size(), 2);
  EXPECT_EQ(rows[0].cells[1].series.name(), "shm:tree");
  EXPECT_EQ(rows[0].cells[1].wrong, 0);
  EXPECT_EQ(rows[1].cells.size(), 1);  // a tree does not gather
}

// The fake backend repeats a rank's own piece instead of its peer's.
TEST(BenchMeasure, WrongElementsAreCountedOverAllRanks) {
  Plan plan;
  plan.series = {{"fake"}};
  plan.operations = {Operation::kAllGather};
  plan.sizes = {1 << 20};
  plan.timings = 1;
  const std::vector<Row> rows = rows_of(plan, 2);
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows[0].cells[0].calls, 1);
  // Half of the result on both ranks; behind the warm-up and behind a turn.
  EXPECT_EQ(rows[0].cells[0].wrong, 2 * 2 * (1 << 20) / 4 / 2);
}

TEST(BenchMeasure, ChecksOnlyWhereAsked) {
  Plan plan;
  plan.series = {{"fake"}};
  plan.operations = {Operation::kAllGather};
  plan.sizes = {4096};
  plan.timings = 1;
  plan.check = false;
  EXPECT_EQ(rows_of(plan, 2)[0].cells[0].wrong, std::nullopt);
}

TEST(BenchMeasure, MemoryGrowsWithTheSeries) {
  Plan plan;
  plan.sizes = {4096, 64 << 20};
  const int64_t one = bytes_of_rank(plan, 2);
  EXPECT_GE(one, 2 * (64 << 20));
  plan.series = {{"shm"}, {"gloo"}};
  EXPECT_EQ(bytes_of_rank(plan, 2) - one, 2 * (64 << 20));
}

}  // namespace
}  // namespace tessera::benchmark
