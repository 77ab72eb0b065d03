// What is right counts as right and what is wrong as wrong: on shm, on a
// backend that invents its peers' values, and with elements changed by hand.
#include "tessera/benchmark/exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/comm/verb.h"

namespace tessera::benchmark {
namespace {

// Keeps the buffers that an exchange works on, in the order of allocation.
struct Kept {
  std::vector<at::Tensor> buffers;
  Allocate allocate() {
    return [this](int64_t numel, at::ScalarType dtype) {
      return buffers.emplace_back(at::empty({numel}, dtype));
    };
  }
};

constexpr int64_t kBytes = 480;
constexpr int64_t kMostElements = 480;

std::string words(const Case& what) {
  return std::string(name_of(what.operation)) + " " + name_of(what.dtype) +
         " " + name_of(what.redop);
}

void expect_right(comm::Communicator& ranks, const Case& what) {
  const Pattern pattern(kMostElements, ranks.world_size());
  Kept kept;
  Exchange exchange(what, ranks.world(), pattern, kept.allocate(),
                    /*copies=*/3);
  for (int round = 0; round < 2; ++round) {
    exchange.rewrite();
    exchange.call();
    EXPECT_EQ(exchange.count_wrong(), 0) << words(what);
  }
}

class ExchangeOf : public ::testing::TestWithParam<int64_t> {};

TEST_P(ExchangeOf, EveryOperationIsRightOnShm) {
  comm::run_threads(GetParam(), "shm", [&](comm::Communicator& ranks) {
    for (const Operation operation : all_operations()) {
      for (const std::string_view name : dtype_names()) {
        expect_right(
            ranks, {operation, *dtype_of(name), comm::ReduceOp::kSum, kBytes});
      }
    }
  });
}

TEST_P(ExchangeOf, EveryReductionIsRightOnShm) {
  comm::run_threads(GetParam(), "shm", [&](comm::Communicator& ranks) {
    for (const comm::ReduceOp redop :
         {comm::ReduceOp::kMean, comm::ReduceOp::kMin, comm::ReduceOp::kMax,
          comm::ReduceOp::kProduct}) {
      for (const auto dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        expect_right(ranks, {Operation::kAllReduce, dtype, redop, kBytes});
        expect_right(ranks, {Operation::kReduceScatter, dtype, redop, kBytes});
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ExchangeOf, ::testing::Values(2, 3, 7));

TEST(Exchange, EachWrongElementCounts) {
  comm::run_threads(2, "shm", [](comm::Communicator& ranks) {
    for (const Operation operation : all_operations()) {
      if (operation == Operation::kBarrier) continue;
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kChar}) {
        const Case what{operation, dtype, comm::ReduceOp::kSum, kBytes};
        const Pattern pattern(kMostElements, 2);
        Kept kept;
        Exchange exchange(what, ranks.world(), pattern, kept.allocate(), 2);
        exchange.rewrite();
        exchange.call();
        at::Tensor& result = kept.buffers.back();
        result[0].add_(1);
        EXPECT_EQ(exchange.count_wrong(), 1) << words(what);
        result[result.numel() - 1].zero_();
        EXPECT_EQ(exchange.count_wrong(), 2) << words(what);
        ranks.world().barrier();
      }
    }
  });
}

TEST(Exchange, AMeanMayRoundButNotBeWrong) {
  comm::run_threads(3, "shm", [](comm::Communicator& ranks) {
    const Case what{Operation::kAllReduce, at::kFloat, comm::ReduceOp::kMean,
                    kBytes};
    const Pattern pattern(kMostElements, 3);
    Kept kept;
    Exchange exchange(what, ranks.world(), pattern, kept.allocate(), 1);
    exchange.rewrite();
    exchange.call();
    at::Tensor& result = kept.buffers.back();
    result.mul_(1 + std::numeric_limits<float>::epsilon());
    EXPECT_EQ(exchange.count_wrong(), 0);
    result[5].mul_(1.0001);
    result[7].fill_(std::numeric_limits<float>::quiet_NaN());
    EXPECT_EQ(exchange.count_wrong(), 2);
  });
}

TEST(Exchange, WhatWasNotExchangedIsWrong) {
  comm::run_threads(2, "shm", [](comm::Communicator& ranks) {
    for (const Operation operation : all_operations()) {
      if (operation == Operation::kBarrier) continue;
      const Case what{operation, at::kFloat, comm::ReduceOp::kSum, kBytes};
      const Pattern pattern(kMostElements, 2);
      Kept kept;
      Exchange exchange(what, ranks.world(), pattern, kept.allocate(), 1);
      exchange.rewrite();
      const bool is_root =
          operation == Operation::kBroadcast && ranks.rank() == 0;
      EXPECT_EQ(exchange.count_wrong(),
                is_root ? 0 : kept.buffers.back().numel())
          << words(what);
    }
  });
}

// Also over more ranks than int8 counts to.
TEST(Pattern, ReductionsAreExactOverAnyNumberOfRanks) {
  using enum comm::ReduceOp;
  constexpr int64_t kRound = 2;
  for (const int64_t ranks : {7, 48, 63, 64, 127, 128, 400}) {
    const Pattern pattern(kMostElements, ranks);
    for (const std::string_view name : dtype_names()) {
      at::Tensor sum = at::zeros({kMostElements}, *dtype_of(name));
      at::Tensor product = at::ones_like(sum);
      const at::Tensor one = at::empty_like(sum);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        pattern.write(one, rank, kRound, kSum);
        sum.add_(one);
        pattern.write(one, rank, kRound, kProduct);
        product.mul_(one);
      }
      EXPECT_EQ(pattern.count_not_reduced(sum, kRound, kSum), 0)
          << ranks << ' ' << name;
      EXPECT_EQ(pattern.count_not_reduced(product, kRound, kProduct), 0)
          << ranks << ' ' << name;
    }
  }
}

// The fake backend gives back this rank's values as its peers'.
TEST(Exchange, ValuesOfAnotherRankAreWrong) {
  const auto ranks =
      comm::make_communicator({.backend = "fake", .rank = 1, .world_size = 4});
  const Pattern pattern(kMostElements, 4);
  Kept kept;
  Exchange exchange(
      {Operation::kAllGather, at::kFloat, comm::ReduceOp::kSum, kBytes},
      ranks->world(), pattern, kept.allocate(), 1);
  exchange.rewrite();
  exchange.call();
  EXPECT_EQ(exchange.count_wrong(), 3 * 30);  // of 4 pieces of 30
}

}  // namespace
}  // namespace tessera::benchmark
