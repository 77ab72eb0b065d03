#include "tessera/engine/batch_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::engine {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

struct Cut {
  int64_t global, micro, degree;     // asked for
  int64_t microbatches, of_fullest;  // found
};

BatchConfig completed(BatchConfig batch, int64_t degree) {
  batch.complete(degree, degree);
  return batch;
}

TEST(BatchConfig, IsMicroTimesAccumulationTimesDegree) {
  EXPECT_EQ(completed({.global = 32}, 4).micro, 8);
  EXPECT_EQ(completed({.global = 32}, 4).microbatches(4), 1);
  EXPECT_EQ(completed({.global = 24, .micro = 3}, 2).microbatches(2), 4);
  // One step of 32 samples on 1 to 32 ranks.
  for (int64_t world : {1, 2, 4, 8, 16, 32}) {
    EXPECT_EQ(completed({.global = 32}, world).micro, 32 / world);
    EXPECT_EQ(completed({.global = 32}, world).microbatches(world), 1);
  }
}

TEST(BatchConfig, MicroBatchesAreOfASizeWithASampleForEachRank) {
  for (const Cut& each :
       {Cut{8, 0, 3, 1, 3}, Cut{8, 2, 3, 2, 2}, Cut{10, 2, 3, 2, 2},
        Cut{20, 2, 3, 4, 2}, Cut{12, 5, 5, 1, 3}, Cut{7, 0, 7, 1, 1},
        Cut{400'000, 3, 7, 20'000, 3},
        // What is even stays as it is.
        Cut{24, 3, 2, 4, 3}, Cut{32, 0, 4, 1, 8}}) {
    BatchConfig batch{
        .global = each.global, .micro = each.micro, .uneven = true};
    batch.complete(each.degree, each.degree);
    EXPECT_EQ(batch.microbatches(each.degree), each.microbatches)
        << each.global;
    EXPECT_EQ(batch.micro, each.of_fullest) << each.global;
    // As a run's config.json has it.
    batch.complete(each.degree, each.degree);
    EXPECT_EQ(batch.microbatches(each.degree), each.microbatches)
        << each.global;
  }
}

std::string refusal(BatchConfig batch, int64_t degree) {
  try {
    batch.complete(degree, degree);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }
  return "";
}

TEST(BatchConfig, WhatHasNoSolutionNamesTheNearest) {
  EXPECT_EQ(refusal({.global = 32}, 3),
            "batch: batch.global 32 = batch.micro ? x accumulation ? x "
            "data-parallel degree 3 (3 ranks) has no solution: 32 is no "
            "multiple of 3. Nearest batch.global: 30 or 33. With batch.uneven "
            "true some ranks take fewer samples than others.");
  EXPECT_EQ(refusal({.global = 10, .micro = 4}, 2),
            "batch: batch.global 10 = batch.micro 4 x accumulation ? x "
            "data-parallel degree 2 (2 ranks) has no solution: 10 is no "
            "multiple of 8. Nearest batch.global: 8 or 16. With batch.uneven "
            "true some ranks take fewer samples than others.");
  EXPECT_THAT(refusal({.global = 3, .micro = 4}, 1),
              HasSubstr("Nearest batch.global: 4."));
}

TEST(BatchConfig, AStepHasOnlySoManyMicroBatches) {
  EXPECT_EQ(refusal({.global = 1'000'000, .micro = 1}, 2),
            "batch.global 1000000 in parts of 1 samples on each of 2 "
            "data-parallel ranks is 500000 micro-batches a step; at most 65536 "
            "fit into a program. Nearest batch.micro: 8 or more.");
  EXPECT_EQ(completed({.global = 131'072, .micro = 1}, 2).micro, 1);
}

TEST(BatchConfig, WhatCannotBeCutNamesTheNearest) {
  EXPECT_EQ(refusal({.global = 3, .uneven = true}, 4),
            "batch.global 3 leaves some of 4 data-parallel ranks without a "
            "sample, also with batch.uneven. Nearest batch.global: 4.");
  EXPECT_EQ(refusal({.global = 12, .micro = 1, .uneven = true}, 5),
            "batch.global 12 cannot be cut into micro-batches of a size that "
            "have a sample for each of 5 data-parallel ranks and at most "
            "batch.micro 1 in the mean. Nearest batch.micro: 2.");
  EXPECT_THAT(refusal({.global = 999'999'937, .micro = 1, .uneven = true}, 3),
              EndsWith("Nearest batch.micro: 333333313."));  // it is a prime
  EXPECT_EQ(refusal({.global = 12, .micro = 2, .uneven = true}, 5), "");
  // What is no way out is not offered.
  const auto offered = HasSubstr("With batch.uneven true");
  EXPECT_THAT(refusal({.global = 12}, 5), offered);
  EXPECT_THAT(refusal({.global = 12, .micro = 1}, 5), Not(offered));
  EXPECT_THAT(refusal({.global = 3}, 4), Not(offered));
  EXPECT_THAT(refusal({.global = 3, .micro = 4}, 1), Not(offered));
}

}  // namespace
}  // namespace tessera::engine
