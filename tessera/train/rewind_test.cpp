#include "tessera/train/rewind.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/files.h"
#include "tessera/train/state.h"
#include "tests/support/failure_of.h"
#include "tests/support/small_run.h"

namespace tessera::train {
namespace {

using data::Skip;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBatch = 4;

// A run whose checkpoints hold where it stood, and no tensor.
class RewindTest : public ::testing::Test {
 protected:
  RewindTest() : config_(testing::small_run(/*ranks=*/1, /*zero_stage=*/0)) {
    config_.run.dir = made_.path();
    config_.run.name = "run";
    config_.batch.global = kBatch;
    config_.spike.action = "rewind";
    config_.spike.skip_before = 3;
    config_.spike.skip_after = 2;
  }

  // `samples`: that its steps took; -1: as many each.
  void save(const std::string& folder, int64_t step, int64_t samples = -1) {
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      checkpoint::State state;
      state.extra =
          to_json(SavedRun{.step = step,
                           .samples = samples < 0 ? step * kBatch : samples,
                           .config = to_json(config_)});
      checkpoint::save(folder, step, state, ranks.world(), {.keep = 0});
    });
  }
  void save(int64_t step) { save(checkpoints(), step); }
  std::string checkpoints() const { return RunFolder(config_).checkpoints(); }

  Rewind found(const SpikePlace& spike, const data::Sampler& sampler) {
    Rewind next;
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      next = find_rewind(config_, RunFolder(config_), sampler, spike,
                         ranks.world());
    });
    return next;
  }
  Rewind found(const SpikePlace& spike) { return found(spike, sampler()); }

  static data::Sampler sampler() {
    return data::Sampler(10'000, {.seq_len = 8, .global_batch = kBatch});
  }
  std::string step(int64_t number) const {
    return checkpoints() + "/step-" + std::to_string(number);
  }
  // Batches, from 1.
  static Skip batches(int64_t first, int64_t last) {
    return {.begin = (first - 1) * kBatch, .end = last * kBatch};
  }

  TemporaryFolder made_;
  engine::RunConfig config_;
};

TEST_F(RewindTest, ToTheNewestBeforeWhatIsLeftOut) {
  for (const int64_t number : {10, 20, 30}) save(number);
  const Rewind next = found({.step = 33});
  EXPECT_EQ(next.resume, step(20));
  EXPECT_EQ(next.num_rewinds, 1);
  EXPECT_THAT(next.left_out, ElementsAre(batches(30, 35)));
  EXPECT_EQ(found({.step = 34}).resume, step(30));
}

TEST_F(RewindTest, ElseToTheOldestAndLeavesOutWhatComesBehindIt) {
  save(10);
  const Rewind next = found({.step = 12});
  EXPECT_EQ(next.resume, step(10));
  EXPECT_THAT(next.left_out, ElementsAre(batches(11, 14)));
}

TEST_F(RewindTest, WhereNothingIsSavedToWhereTheRunWasBegun) {
  const Rewind anew = found({.step = 2});
  EXPECT_EQ(anew.resume, "auto");
  EXPECT_THAT(anew.left_out, ElementsAre(batches(1, 4)));
  save(10);  // of another line
  const std::string elsewhere = made_.file("other/step-100");
  const Rewind next = found({.step = 102,
                             .first_samples = 100 * kBatch,
                             .so_far = {.resume = elsewhere}});
  EXPECT_EQ(next.resume, elsewhere);
  EXPECT_THAT(next.left_out, ElementsAre(batches(101, 104)));
}

TEST_F(RewindTest, NeverToAnotherLineOfSteps) {
  for (const int64_t number : {10, 20, 26, 30}) save(number);
  checkpoint::go_back_to(checkpoints(), 20);
  for (const int64_t number : {30, 40}) save(number);
  checkpoint::go_back_to(checkpoints(), 30);
  // 26 is of the line that was left at 20, 40 of that left at 30.
  EXPECT_EQ(found({.step = 50}).resume, step(30));
  EXPECT_EQ(found({.step = 31}).resume, step(20));
  checkpoint::go_back_to(checkpoints(), 10);
  save(20);
  EXPECT_EQ(found({.step = 33}).resume, step(20));
  // The run came from step 15 of a checkpoint elsewhere, behind commit 5.
  EXPECT_EQ(checkpoint::read_manifest(step(20)).sequence, 6);
  const SpikePlace spike{.step = 22, .so_far = {.line_base = 5}};
  EXPECT_EQ(found(spike).resume, step(20));
}

TEST_F(RewindTest, WhoGoesOnFromThereKnowsOfIt) {
  for (const int64_t number : {10, 20}) save(number);
  const auto kept = [&](int64_t number) {
    Rewind kept;
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      add_rewinds(kept, {.run = {.step = number}}, RunFolder(config_), kBatch,
                  ranks.world());
    });
    return kept;
  };
  EXPECT_EQ(kept(20).num_rewinds, 0);
  const Rewind next = found({.step = 25});
  EXPECT_EQ(next.resume, step(20));
  EXPECT_EQ(kept(20).num_rewinds, 1);
  EXPECT_EQ(kept(20).left_out, next.left_out);
  EXPECT_EQ(kept(10).num_rewinds, 0);
  save(20);  // another one by that name
  EXPECT_EQ(kept(20).num_rewinds, 0);
  found({.step = 25});
  const std::string good = read_file(checkpoints() + "/rewound");
  const std::string head = good.substr(0, good.find('\n') + 1);
  for (const std::string& bad :
       {std::string(), head, head + "1\n3\n", head + "1\n4 3\n", head + "-1\n",
        head + "1\nx\n", std::string("what")}) {
    write_file_atomic(checkpoints() + "/rewound", bad);
    EXPECT_THAT(testing::failure_of([&] { kept(20); }),
                HasSubstr("checkpoints/rewound"))
        << bad;
  }
}

TEST_F(RewindTest, CountsSamplesWhereTheBatchWasAnotherBefore) {
  save(checkpoints(), 10, /*samples=*/50);
  data::Sampler other = sampler();
  other.go_on(10, 50);
  const Rewind next = found({.step = 12}, other);
  EXPECT_THAT(next.left_out, ElementsAre(Skip{50, 50 + 4 * kBatch}));
}

TEST_F(RewindTest, AddsToWhatWasLeftOutBefore) {
  save(10);
  save(20);
  data::Sampler left = sampler();
  left.leave_out({batches(23, 26)});
  // Step 25 takes batch 29: 23 to 26 lie between.
  const SpikePlace spike{
      .step = 25, .so_far = {.num_rewinds = 1, .left_out = {batches(23, 26)}}};
  const Rewind next = found(spike, left);
  EXPECT_EQ(next.num_rewinds, 2);
  EXPECT_THAT(next.left_out, ElementsAre(batches(22, 31)));
}

TEST_F(RewindTest, NoMoreOftenThanItMay) {
  const std::string words = testing::failure_of(
      [&] { found({.step = 7, .so_far = {.num_rewinds = 5}}); });
  EXPECT_THAT(words, HasSubstr("gone back 5 times, which is all that "
                               "spike.max_rewinds allows"));
}

TEST(SavedRun, KeepsWhatSpikesNeed) {
  const SavedRun run{.step = 7,
                     .samples = 28,
                     .tokens = 900,
                     .config = "{}",
                     .losses = {2.5, 0.1},
                     .num_rewinds = 2,
                     .left_out = {{0, 4}, {8, 12}},
                     .line_base = 3};
  const SavedRun again = saved_run_from(to_json(run), "here");
  EXPECT_EQ(again.losses, run.losses);
  EXPECT_EQ(again.num_rewinds, 2);
  EXPECT_EQ(again.left_out, run.left_out);
  EXPECT_EQ(again.line_base, 3);
  EXPECT_EQ(again.tokens, 900);
  const std::string none = to_json(SavedRun{.step = 7, .config = "{}"});
  EXPECT_TRUE(saved_run_from(none, "here").left_out.empty());
  for (const char* bad :
       {R"("left_out": 3)", R"("left_out": [[1]])", R"("left_out": [[4, 4]])",
        R"("left_out": [[-1, 2]])", R"("left_out": [[0, 4], [2, 6]])",
        R"("losses": ["a"])", R"("losses": {})", R"("rewinds": "2")",
        R"("rewinds": -1)"}) {
    const std::string text = none.substr(0, none.size() - 1) + ", " + bad + "}";
    EXPECT_THAT(testing::failure_of([&] { saved_run_from(text, "here"); }),
                HasSubstr("here"))
        << bad;
  }
}

}  // namespace
}  // namespace tessera::train
