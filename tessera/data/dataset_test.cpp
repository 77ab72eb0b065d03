#include "tessera/data/dataset.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kLength = 4;

// Ids count up from `first`, so that a token tells its source and its sample.
Source source(const TemporaryFolder& folder, const std::string& name,
              int64_t first, int64_t samples, double weight = 1) {
  std::string bytes;
  for (int64_t i = 0; i <= samples * kLength; ++i) {
    const auto id = static_cast<uint32_t>(first + i);
    bytes.append(reinterpret_cast<const char*>(&id), sizeof(id));
  }
  write_file_atomic(folder.file(name + ".u32"), bytes);
  return {name,
          std::make_shared<const TokenStream>(
              open_tokens({.paths = {folder.file(name + ".u32")},
                           .vocab_size = int64_t{1} << 31})),
          weight};
}

// Samples that the rows of a batch are, by their first token.
void append(const Batch& batch, std::vector<int64_t>& samples) {
  for (int64_t row = 0; row < batch.inputs.size(0); ++row) {
    const auto first = batch.inputs[row][0].item<int64_t>();
    EXPECT_EQ(batch.targets[row][kLength - 1].item<int64_t>(), first + kLength);
    samples.push_back(first);
  }
}

constexpr int64_t kFar = 1'000'000;  // between the ids of two sources

class MixedTest : public ::testing::Test {
 protected:
  // 1,000 steps of 8 samples, on so many ranks; after `stop` steps by another
  // data set, as after a resume.
  std::vector<int64_t> run(int64_t ranks, int64_t stop) {
    std::vector<int64_t> samples;
    Dataset now = open();
    for (int64_t step = 0; step < 1000; ++step) {
      if (step == stop) now = open();
      for (int64_t rank = 0; rank < ranks; ++rank) {
        append(now.batch(step, rank * 8 / ranks, 8 / ranks), samples);
      }
    }
    return samples;
  }
  Dataset open() const {
    return Dataset(sources_, {.seq_len = kLength, .global_batch = 8, .seed = 3},
                   held_);
  }

  TemporaryFolder folder_;
  std::vector<Source> sources_ = {source(folder_, "a", 0, 700, 0.7),
                                  source(folder_, "b", kFar, 90, 0.2),
                                  source(folder_, "c", 2 * kFar, 5000, 0.1)};
  Held held_;
};

// As on a rank that another one reads for.
TEST_F(MixedTest, TheOrderNeedsNoTokens) {
  for (const auto part : {Part::kAll, Part::kKept, Part::kHeldOut}) {
    held_ = {.share = part == Part::kAll ? 0 : 0.1, .part = part};
    const Dataset whole = open();
    const auto sources = sources_;
    for (Source& source : sources_) {
      source.num_tokens = source.size();
      source.tokens = nullptr;
    }
    const Dataset order = open();
    for (const int64_t step : {0, 7, 99}) {
      EXPECT_EQ(order.sampler().sample_indices(step),
                whole.sampler().sample_indices(step));
    }
    EXPECT_EQ(order.sampler().num_samples(), whole.sampler().num_samples());
    sources_ = sources;
  }
}

TEST_F(MixedTest, CountsAreExactOnAnyRanksAndOverAStop) {
  const std::vector<int64_t> samples = run(1, -1);
  EXPECT_EQ(run(2, 500), samples);
  EXPECT_EQ(run(4, 333), samples);
  std::map<int64_t, std::vector<int64_t>> of_source;
  for (const int64_t sample : samples) {
    of_source[sample / kFar].push_back(sample);
  }
  EXPECT_EQ(of_source[0].size(), 5600u);
  EXPECT_EQ(of_source[1].size(), 1600u);
  EXPECT_EQ(of_source[2].size(), 800u);
  // Each has epochs of its own, in which each sample comes once.
  const auto epoch = [&](int64_t source, int64_t number, int64_t size) {
    const auto begin = of_source[source].begin() + number * size;
    return std::vector<int64_t>(begin, begin + size);
  };
  for (int64_t number = 0; number < 8; ++number) {
    const auto a = epoch(0, number, 700);
    EXPECT_EQ(std::set<int64_t>(a.begin(), a.end()).size(), 700u);
    const auto b = epoch(1, number, 90);
    EXPECT_EQ(std::set<int64_t>(b.begin(), b.end()).size(), 90u);
    EXPECT_NE(epoch(1, number + 1, 90), b);
  }
  EXPECT_EQ(std::set<int64_t>(of_source[2].begin(), of_source[2].end()).size(),
            800u);
}

TEST_F(MixedTest, WhatIsHeldOutIsNeverTrainedOn) {
  held_ = {0.1, Part::kKept};
  const std::vector<int64_t> samples = run(2, 400);
  const std::set<int64_t> trained(samples.begin(), samples.end());
  const Dataset valid(sources_, {.seq_len = kLength, .global_batch = 8},
                      {0.1, Part::kHeldOut});
  EXPECT_EQ(valid.sampler().num_samples(), 70 + 9 + 500);
  std::vector<int64_t> held;
  append(valid.in_order(0, 300), held);
  append(valid.in_order(300, 279), held);
  std::map<int64_t, int64_t> of_source;
  for (const int64_t sample : held) {
    EXPECT_FALSE(trained.contains(sample));
    ++of_source[sample / kFar];
  }
  EXPECT_EQ(std::set<int64_t>(held.begin(), held.end()).size(), 579u);
  EXPECT_EQ(of_source, (std::map<int64_t, int64_t>{{0, 70}, {1, 9}, {2, 500}}));
  // The first ones are of all sources, and the same for any seed.
  EXPECT_TRUE(std::any_of(held.begin(), held.begin() + 60,
                          [](int64_t sample) { return sample < kFar; }));
  const Dataset other(sources_,
                      {.seq_len = kLength, .global_batch = 8, .seed = 99},
                      {0.1, Part::kHeldOut});
  std::vector<int64_t> again;
  append(other.in_order(0, 579), again);
  EXPECT_EQ(again, held);
  // The others are all trained on.
  int64_t kept = 0;
  for (const int64_t sample : trained) kept += sample < 2 * kFar ? 1 : 0;
  EXPECT_EQ(kept, 630 + 81);
}

TEST_F(MixedTest, WithoutAShareAllIsAsItWas) {
  const SamplerOptions options = {
      .seq_len = kLength, .global_batch = 5, .seed = 9};
  const Dataset dataset({sources_[0]}, options);
  const Sampler sampler(700 * kLength + 1, options);
  for (int64_t step = 0; step < 200; ++step) {
    std::vector<int64_t> samples;
    append(dataset.batch(step, 0, 5), samples);
    std::vector<int64_t> expected = sampler.sample_indices(step);
    for (int64_t& sample : expected) sample *= kLength;
    ASSERT_EQ(samples, expected);
  }
}

TEST_F(MixedTest, WhatHasNoSampleIsRefusedByName) {
  const auto message = [&](std::vector<Source> sources, const Held& held) {
    try {
      const Dataset dataset(std::move(sources), {.seq_len = 8}, held);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      return message_of(error);
    }
    return std::string("nothing was wrong");
  };
  EXPECT_THAT(message({sources_[0], source(folder_, "tiny", 0, 1)}, {}),
              HasSubstr("tiny: has 5 tokens"));
  EXPECT_THAT(message({sources_[1]}, {0.001, Part::kKept}),
              AllOf(HasSubstr("data.valid_share (0.001) of 45 samples is none"),
                    HasSubstr("larger share")));
}

}  // namespace
}  // namespace tessera::data
