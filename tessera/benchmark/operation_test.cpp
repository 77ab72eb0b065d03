#include "tessera/benchmark/operation.h"

#include <gtest/gtest.h>

#include <string>

#include "tessera/comm/verb.h"

namespace tessera::benchmark {
namespace {

TEST(BenchOperation, NamesLeadBack) {
  for (const Operation operation : all_operations()) {
    EXPECT_EQ(operation_of(name_of(operation)), operation);
  }
  for (const std::string_view name : dtype_names()) {
    EXPECT_EQ(name_of(dtype_of(name).value()), name);
  }
  for (const char* name : {"sum", "mean", "min", "max", "product"}) {
    EXPECT_STREQ(name_of(redop_of(name).value()), name);
  }
  EXPECT_EQ(operation_of("allreduce"), std::nullopt);
  EXPECT_EQ(dtype_of("float"), std::nullopt);
  EXPECT_EQ(redop_of("avg"), std::nullopt);
}

// nccl-tests, doc/PERFORMANCE.md.
TEST(BenchOperation, BusFactors) {
  for (const int64_t ranks : {2, 3, 8, 16}) {
    const auto n = static_cast<double>(ranks);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kAllReduce, ranks), 2 * (n - 1) / n);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kAllGather, ranks), (n - 1) / n);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kReduceScatter, ranks), (n - 1) / n);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kAllToAll, ranks), (n - 1) / n);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kBroadcast, ranks), 1);
    EXPECT_DOUBLE_EQ(bus_factor(Operation::kSendRecv, ranks), 1);
  }
}

void expect_counts(Operation operation, int64_t bytes, int64_t ranks,
                   const Counts& expected) {
  const Counts counts = counts_of(operation, bytes, /*element_bytes=*/4, ranks);
  const std::string what = name_of(operation);
  EXPECT_EQ(counts.input, expected.input) << what;
  EXPECT_EQ(counts.output, expected.output) << what;
  EXPECT_EQ(counts.piece, expected.piece) << what;
  EXPECT_EQ(counts.size, expected.size) << what;
}

TEST(BenchOperation, CountsOfARank) {
  expect_counts(Operation::kAllReduce, 4096, 4, {1024, 0, 1024, 1024});
  expect_counts(Operation::kBroadcast, 4096, 4, {1024, 0, 1024, 1024});
  expect_counts(Operation::kSendRecv, 4096, 4, {1024, 1024, 1024, 1024});
  expect_counts(Operation::kAllGather, 4096, 4, {256, 1024, 256, 1024});
  expect_counts(Operation::kReduceScatter, 4096, 4, {1024, 256, 256, 1024});
  expect_counts(Operation::kAllToAll, 4096, 4, {1024, 1024, 256, 1024});
  expect_counts(Operation::kBarrier, 4096, 4, {0, 0, 0, 0});
}

TEST(BenchOperation, WhatDoesNotDivideIsLess) {
  expect_counts(Operation::kAllGather, 4096, 3, {341, 1023, 341, 1023});
  expect_counts(Operation::kReduceScatter, 4099, 3, {1023, 341, 341, 1023});
  expect_counts(Operation::kAllReduce, 4099, 3, {1024, 0, 1024, 1024});
}

TEST(BenchOperation, NoPieceIsEmpty) {
  expect_counts(Operation::kAllReduce, 1, 8, {1, 0, 1, 1});
  expect_counts(Operation::kAllToAll, 4, 8, {8, 8, 1, 8});
}

}  // namespace
}  // namespace tessera::benchmark
