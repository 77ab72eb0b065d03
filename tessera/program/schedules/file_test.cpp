#include "tessera/program/schedules/file.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tessera/core/files.h"
#include "tests/support/programs.h"

namespace tessera::program::schedules {
namespace {

class ScheduleFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = temporary_files() /
              c10::str("tessera-schedule-",
                       ::testing::UnitTest::GetInstance()->random_seed(), "-",
                       reinterpret_cast<uintptr_t>(this));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Schedule read(const std::string& text) const {
    write_file_atomic(path(), text);
    return named(path());
  }
  std::string path() const { return (folder_ / "own.txt").string(); }

  void expect_refused(const std::string& text, const std::string& rule) const {
    try {
      read(text);
      FAIL() << "not refused: " << rule;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(path() + ":" + rule),
                std::string::npos)
          << error.what_without_backtrace();
    }
  }

  std::filesystem::path folder_;
};

TEST_F(ScheduleFile, EveryScheduleIsWrittenAndRead) {
  for (const Schedule& schedule : all()) {
    const int64_t v = schedule.chunked ? 2 : 1;
    const Shape shape{.stages = 4, .chunks = v, .num_microbatches = 8};
    const Schedule again = read(written(schedule, shape));
    EXPECT_EQ(again.placement, schedule.placement);
    EXPECT_TRUE(takes(again, shape));
    EXPECT_FALSE(takes(again, {.stages = 4, .num_microbatches = 9}));
    EXPECT_EQ(written(again, shape), written(schedule, shape));
    for (int64_t stage = 0; stage < 4; ++stage) {
      EXPECT_EQ(again.turns(shape, stage), schedule.turns(shape, stage));
    }
    EXPECT_NO_THROW(check(stages_of(path(), shape, 2).world)) << schedule.name;
  }
}

TEST_F(ScheduleFile, IsCompact) {
  EXPECT_EQ(written(named("1f1b"), {.stages = 2, .num_microbatches = 3}),
            "stages 2, chunks 1, microbatches 3\n"
            "F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2\n");
  EXPECT_EQ(
      written(named("zb_v"), {.stages = 1, .chunks = 2, .num_microbatches = 1}),
      "stages 1, chunks 2, microbatches 1, placement v\n"
      "F0 F0.1 I0.1 W0.1 I0 W0\n");
}

TEST_F(ScheduleFile, NamesLineAndRule) {
  const std::string head = "# mine\nstages 2, chunks 1, microbatches 2\n";
  const std::string first = "F0 F1 B0 B1\n";
  EXPECT_NO_THROW(read(head + first + "\nF0 B0  F1 I1 W1 # last\n"));
  expect_refused("", "0: there is no line");
  expect_refused("stage 2\n", "1: \"stage\" is not stages");
  expect_refused("stages\n", "1: stages has no value");
  expect_refused("stages two\n", "1: stages is \"two\", which is no number");
  expect_refused("stages 2, chunks 0, microbatches 1\n", "1: stages, chunks");
  expect_refused("stages 2, chunks 1, microbatches 1, placement w\n",
                 "1: placement is w");
  expect_refused("stages 2, chunks 1, stages 3, microbatches 1\n",
                 "1: stages is said twice");
  expect_refused(
      "stages 2, chunks 2, placement v, microbatches 1, placement v\n",
      "1: placement is said twice");
  expect_refused("stages 3, chunks 2, microbatches 2, placement mirrored\n",
                 "1: mirrored stages");
  expect_refused(
      "stages 2, chunks 2, microbatches 2, placement mirrored\n"
      "F0 B0 F1 B1\nF0 B0 F1 B1\n",
      "3: all micro-batches go through chunk 0, and none through its mirror");
  expect_refused("stages 2, ranks 3, chunks 1, microbatches 2\n",
                 "1: \"ranks\" is not a schedule's. Every stage has as many");
  expect_refused(head + first, "3: there are lines of 1 stages, not 2");
  expect_refused(head + first + first + first,
                 "5: a line more than there are stages (2). Every stage has as "
                 "many ranks as every other");
  expect_refused(head + first + "F0 X1\n", "4: \"X1\" is no task");
  expect_refused(head + first + "F0 F\n", "4: the micro-batch of F is \"\"");
  expect_refused(head + first + "F0 F2\n", "4: F2: there are 2 micro-batches");
  expect_refused(head + first + "F0 F1.1\n", "4: F1.1: there are 2");
  expect_refused(head + first + "F0 B0 F0 B0\n", "4: F0 comes twice");
  expect_refused(head + first + "B0 F0 F1 B1\n",
                 "4: B0 comes before its forward");
  expect_refused(head + first + "F0 W0 I0 F1 B1\n", "4: W0 comes before I0");
  expect_refused(head + first + "F0 B0 W0 F1 B1\n",
                 "4: W0 comes behind a whole backward");
  expect_refused(head + first + "F0 I0 B0 F1 B1\n",
                 "4: B0 comes behind a part of itself");
  expect_refused(head + first + "F0 B0\n", "4: micro-batch 1 goes through 0");
  expect_refused(head + first + "F0 I0 F1 B1\n",
                 "4: micro-batch 0 never goes backward");
  expect_refused(head + "F0 B0 F1 B1\nF1 B1 F0 B0\n",
                 "3: stage 0: B0 waits for ever");
}

}  // namespace
}  // namespace tessera::program::schedules
