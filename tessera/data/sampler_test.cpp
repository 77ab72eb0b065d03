#include "tessera/data/sampler.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/dataset.h"

namespace tessera::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PermutationTest, EveryIndexComesOnce) {
  for (const uint64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097}) {
    for (const uint64_t epoch : {0, 1, 2}) {
      const Permutation permutation(size, 42, epoch);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < size; ++i) {
        ASSERT_LT(permutation(i), size);
        seen.insert(permutation(i));
      }
      EXPECT_EQ(seen.size(), size);
    }
  }
}

TEST(PermutationTest, SeedsAndEpochsGiveOtherOrders) {
  const auto order = [](uint64_t seed, uint64_t epoch) {
    const Permutation permutation(1000, seed, epoch);
    std::vector<uint64_t> places;
    for (uint64_t i = 0; i < 1000; ++i) places.push_back(permutation(i));
    return places;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 0), order(2, 0));
}

// An even spread: of 10,000 positions each tenth gets about 100 of the first
// 1,000, the mean shift is that of a random order.
TEST(PermutationTest, SpreadsEvenly) {
  const uint64_t size = 10'000;
  const Permutation permutation(size, 7, 3);
  std::vector<int> tenths(10);
  int ascending = 0;
  for (uint64_t i = 0; i < size; ++i) {
    if (i < 1000) ++tenths[permutation(i) * 10 / size];
    if (i > 0 && permutation(i) > permutation(i - 1)) ++ascending;
  }
  for (const int count : tenths) EXPECT_NEAR(count, 100, 50);  // 5 sigma
  EXPECT_NEAR(ascending, 5000, 150);                           // 5 sigma
}

TEST(PermutationTest, IndicesBeyond32BitsStayInRange) {
  const uint64_t size = (uint64_t{1} << 40) + 12345;
  const Permutation permutation(size, 1, 1);
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t place = permutation(size - 1 - i * 1'000'003);
    ASSERT_LT(place, size);
    seen.insert(place);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(SamplerTest, WithoutShuffleSamplesComeAsTheyLie) {
  const Sampler sampler(5 * 8 + 1,
                        {.seq_len = 8, .global_batch = 2, .shuffle = false});
  EXPECT_EQ(sampler.num_samples(), 5);
  EXPECT_THAT(sampler.sample_indices(0), ElementsAre(0, 1));
  EXPECT_THAT(sampler.sample_indices(2), ElementsAre(4, 0));  // wraps
  EXPECT_THAT(sampler.sample_indices(3), ElementsAre(1, 2));
  EXPECT_EQ(sampler.first_token(3), 24);
}

TEST(SamplerTest, WithShuffleEachSampleComesOnceAnEpoch) {
  const Sampler sampler(101 * 4 + 3,
                        {.seq_len = 4, .global_batch = 7, .seed = 5});
  EXPECT_EQ(sampler.num_samples(), 101);
  std::vector<int64_t> order;
  for (int64_t step = 0; order.size() < 3 * 101; ++step) {
    for (const int64_t sample : sampler.sample_indices(step)) {
      order.push_back(sample);
    }
  }
  std::set<std::vector<int64_t>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto begin = order.begin() + epoch * 101;
    EXPECT_EQ(std::set<int64_t>(begin, begin + 101).size(), 101u);
    epochs.emplace(begin, begin + 101);
  }
  EXPECT_EQ(epochs.size(), 3u);
}

TEST(SamplerTest, SlicesOfAStepAreTheStep) {
  const Sampler sampler(1000, {.seq_len = 9, .global_batch = 12, .seed = 5});
  for (const int64_t ranks : {1, 2, 3, 4, 6, 12}) {
    for (int64_t step = 0; step < 30; ++step) {
      std::vector<int64_t> joined;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const int64_t sample :
             sampler.sample_indices(step, rank * (12 / ranks), 12 / ranks)) {
          joined.push_back(sample);
        }
      }
      EXPECT_EQ(joined, sampler.sample_indices(step));
    }
  }
}

// After 3 steps of 4 samples, two of 6: those that follow.
TEST(SamplerTest, GoesOnBehindWhatOtherBatchesTook) {
  const Sampler small(1000, {.seq_len = 8, .global_batch = 4, .seed = 7});
  Sampler large(1000, {.seq_len = 8, .global_batch = 6, .seed = 7});
  EXPECT_EQ(large.taken_before(3), 18);
  large.go_on(3, small.taken_before(3));
  EXPECT_EQ(large.taken_before(3), 12);
  std::vector<int64_t> found = large.sample_indices(3);
  const auto more = large.sample_indices(4);
  found.insert(found.end(), more.begin(), more.end());
  std::vector<int64_t> wanted;
  for (int64_t step = 3; step < 6; ++step) {
    const auto next = small.sample_indices(step);
    wanted.insert(wanted.end(), next.begin(), next.end());
  }
  EXPECT_EQ(found, wanted);
}

TEST(SamplerTest, WhatIsSkippedIsAsIfItWereNotThere) {
  const SamplerOptions options = {.seq_len = 8, .global_batch = 4, .seed = 7};
  const Sampler whole(1000, options);
  Sampler sampler(1000, {.seq_len = 8,
                         .global_batch = 4,
                         .seed = 7,
                         .skips = {{8, 12}, {20, 28}, {28, 32}}});
  // Steps 2, 5 and 6, 7 of the whole order.
  const std::vector<int64_t> taken = {0, 1, 3, 4, 8, 9};
  for (size_t step = 0; step < taken.size(); ++step) {
    EXPECT_EQ(sampler.sample_indices(static_cast<int64_t>(step)),
              whole.sample_indices(taken[step]))
        << step;
  }
  sampler.go_on(3, 14);  // within a batch
  EXPECT_EQ(sampler.sample_indices(3, 0, 2), whole.sample_indices(4, 2, 2));
  EXPECT_EQ(sampler.sample_indices(3, 2, 2), whole.sample_indices(8, 0, 2));
}

TEST(SamplerTest, WhatIsLeftOutLaterCountsFromThere) {
  const SamplerOptions options = {
      .seq_len = 8, .global_batch = 4, .seed = 7, .skips = {{8, 12}}};
  Sampler sampler(1000, options);
  sampler.leave_out({{40, 44}, {10, 16}});
  EXPECT_EQ(sampler.options().skips, (std::vector<Skip>{{8, 16}, {40, 44}}));
  const Sampler at_once(1000, {.seq_len = 8,
                               .global_batch = 4,
                               .seed = 7,
                               .skips = {{8, 16}, {40, 44}}});
  for (const int64_t step : {0, 1, 2, 5, 9}) {
    EXPECT_EQ(sampler.sample_indices(step), at_once.sample_indices(step));
  }
}

TEST(SamplerTest, SkipsAreJoinedWhereTheyMeet) {
  EXPECT_EQ(joined({{20, 28}, {4, 8}, {28, 32}, {6, 7}, {30, 40}}),
            (std::vector<Skip>{{4, 8}, {20, 40}}));
  EXPECT_TRUE(joined({}).empty());
}

TEST(SamplerTest, ASkipIsToldInBatchesWhereItIsWhole) {
  EXPECT_EQ(text_of({8, 12}, 4), "batch 3");
  EXPECT_EQ(text_of({8, 20}, 4), "batches 3 to 5");
  EXPECT_EQ(text_of({8, 14}, 4), "samples 8 to 13 in the order of the data");
  EXPECT_EQ(text_of({8, 12}, 0), "samples 8 to 11 in the order of the data");
}

TEST(SamplerTest, DataWithoutAWholeSampleIsRefused) {
  EXPECT_EQ(Sampler(9, {.seq_len = 8}).num_samples(), 1);
  for (const int64_t tokens : {0, 1, 8}) {
    try {
      const Sampler sampler(tokens, {.seq_len = 8}, "data.valid");
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      EXPECT_THAT(
          error.what_without_backtrace(),
          HasSubstr("data.valid: has " + std::to_string(tokens) +
                    " tokens, but one sample of seq_len 8 takes 8 + 1"));
    }
  }
}

TEST(DatasetTest, TargetsAreTheTokensBehindTheInputs) {
  const TemporaryFolder folder;
  std::string bytes;
  for (int i = 0; i < 31; ++i) bytes += {static_cast<char>(i), '\0'};
  write_file_atomic(folder.file("a.bin"), bytes);
  const Dataset dataset(
      open_tokens({.paths = {folder.file("a.bin")}, .vocab_size = 31}),
      {.seq_len = 5, .global_batch = 4, .shuffle = false});
  const Batch batch = dataset.batch(0, 1, 2);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{2, 5}));
  EXPECT_TRUE(at::equal(batch.inputs.flatten(), at::arange(5, 15, at::kLong)));
  EXPECT_TRUE(at::equal(batch.targets, batch.inputs + 1));
  const Batch valid = dataset.in_order(5, 1);
  EXPECT_TRUE(
      at::equal(valid.targets.flatten(), at::arange(26, 31, at::kLong)));
  EXPECT_THROW(dataset.in_order(5, 2), c10::Error);
  EXPECT_EQ(dataset.batch(3, 0, 0).inputs.size(0), 0);
}

TEST(DatasetTest, BatchesAreTheSamplesOfTheirIndices) {
  const TemporaryFolder folder;
  std::string bytes;
  for (int i = 0; i < 200; ++i) bytes += {static_cast<char>(i), '\0'};
  write_file_atomic(folder.file("a.bin"), bytes);
  const Dataset dataset(
      open_tokens({.paths = {folder.file("a.bin")}, .vocab_size = 256}),
      {.seq_len = 6, .global_batch = 5, .seed = 9});
  for (int64_t step = 0; step < 20; ++step) {
    const Batch batch = dataset.batch(step, 0, 5);
    const auto samples = dataset.sampler().sample_indices(step);
    for (int64_t row = 0; row < 5; ++row) {
      EXPECT_EQ(batch.inputs[row][0].item<int64_t>(), 6 * samples[row]);
      EXPECT_EQ(batch.targets[row][5].item<int64_t>(), 6 * samples[row] + 6);
    }
  }
}

}  // namespace
}  // namespace tessera::data
