#include "tessera/train/resumed_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/train/rewind.h"
#include "tests/support/failure_of.h"
#include "tests/support/small_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Change = std::function<void(engine::RunConfig&)>;

// What a run with `now` says of a checkpoint of a run with `saved`.
std::string said(const Change& saved, const Change& now) {
  auto before = testing::small_run(/*ranks=*/1, /*zero_stage=*/0);
  auto after = before;
  saved(before);
  now(after);
  try {
    refuse_other_states(before, after, "runs/a/checkpoints/step-3");
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return message_of(error);
  }
  return "";
}

void nothing(engine::RunConfig&) {}

TEST(ResumedRun, OfOtherStatesIsRefusedByKeysWithBothValues) {
  const std::string all = said(
      [](auto& c) {
        c.optimizer.type = "sgd";
        c.optimizer.momentum = 0.9;
      },
      [](auto& c) {
        c.optimizer.ema = 0.99;
        c.precision.compute = "bf16";
      });
  EXPECT_THAT(
      all,
      AllOf(HasSubstr("runs/a/checkpoints/step-3 holds other tensors"),
            HasSubstr("optimizer.type is \"sgd\" in it and \"adamw\" in this "
                      "run; optimizer.momentum is 0.9 in it and 0.0 in"),
            HasSubstr("optimizer.ema is 0.0 in it and 0.99 in this run"),
            HasSubstr("precision.compute is \"fp32\" in it and \"bf16\""),
            HasSubstr("--model.from=runs/a/checkpoints/step-3")));
  EXPECT_THAT(said(nothing, [](auto& c) { c.optimizer.state_dtype = "bf16"; }),
              HasSubstr("optimizer.state_dtype is \"auto\" in it"));
}

// Other keys of the optimizer warn alone.
TEST(ResumedRun, OfTheSameStatesIsTaken) {
  EXPECT_EQ(said(nothing, nothing), "");
  EXPECT_EQ(said(nothing, [](auto& c) { c.optimizer.type = "adam"; }), "");
  EXPECT_EQ(said(nothing, [](auto& c) { c.optimizer.lr = 7; }), "");
  EXPECT_EQ(said(nothing, [](auto& c) { c.optimizer.momentum = 0.5; }), "");
  EXPECT_EQ(said(nothing, [](auto& c) { c.optimizer.state_dtype = "fp32"; }),
            "");
  EXPECT_EQ(said([](auto& c) { c.optimizer.ema = 0.9; },
                 [](auto& c) { c.optimizer.ema = 0.99; }),
            "");
  EXPECT_EQ(said(nothing, [](auto& c) { c.model.max_seq = 4096; }), "");
}

TEST(ResumedRun, OfAnotherModelNamesWhatMakesItOne) {
  EXPECT_THAT(said(nothing,
                   [](auto& c) {
                     c.model.layers = 3;
                     c.model.dropout = 0.5;
                   }),
              AllOf(HasSubstr("model.layers is 4 in it and 3 in this run"),
                    HasSubstr("another run.name"), Not(HasSubstr("dropout")),
                    Not(HasSubstr("--model.from"))));
  const auto with_window = [](int64_t layers, int64_t window) {
    return [=](engine::RunConfig& c) {
      c.model.family = "mistral";
      c.model.layers = layers;
      c.model.window = window;
    };
  };
  EXPECT_THAT(said(with_window(4, 5), with_window(3, 7)),
              AllOf(HasSubstr("model.layers is 4 in it and 3 in this run"),
                    Not(HasSubstr("window"))));
  EXPECT_THAT(said(nothing, [](auto& c) { c.model.lora.rank = 2; }),
              HasSubstr("model.lora.rank is 0 in it and 2 in this run"));
}

TEST(ResumedRun, WhatWasTakenIsNotSkippedAnyMore) {
  const TemporaryFolder made;
  auto config = testing::small_run(/*ranks=*/1, /*zero_stage=*/0);
  const std::string folder = made.file("checkpoints");
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    checkpoint::State state;
    state.extra = to_json(SavedRun{.step = 3,
                                   .samples = 3 * config.batch.global,
                                   .config = to_json(config)});
    checkpoint::save(folder, 3, state, ranks.world());
  });
  const auto said = [&](const std::string& skip) {
    config.data.skip = {skip};
    return testing::failure_of([&] { check_resumed(config, "auto", folder); });
  };
  EXPECT_EQ(said("4"), "");
  EXPECT_THAT(said("3:4"), HasSubstr("the checkpoint after step 3 was"));
  // A run that went back from a spike may have left them out by itself.
  write_file_atomic(folder + "/" + kRewoundName, "");
  EXPECT_EQ(said("3:4"), "");
}

TEST(ResumedRun, OtherTokensOfTheSameFilesAreSaid) {
  const auto config = testing::small_run(/*ranks=*/1, /*zero_stage=*/0);
  SavedRun saved{.config = to_json(config), .data = 7, .caches = 8};
  const auto said = [&](uint64_t data, uint64_t caches) {
    ::testing::internal::CaptureStderr();
    warn_of_changes(saved_run_from(to_json(saved), "here"), config, data,
                    caches);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(7, 8), "");
  EXPECT_THAT(said(7, 9),
              AllOf(HasSubstr("the tokens of the data are not"),
                    HasSubstr("strftime_now"), Not(HasSubstr("other files"))));
  EXPECT_THAT(said(6, 9),
              AllOf(HasSubstr("other files"), Not(HasSubstr("strftime_now"))));
  EXPECT_EQ(said(7, 0), "");
  saved.caches = 0;  // of an older version
  EXPECT_EQ(said(7, 9), "");
  EXPECT_THAT(testing::failure_of([&] {
                saved_run_from(R"({"step": 1, "data": "1", "config": {},
                                   "caches": "x"})",
                               "here");
              }),
              HasSubstr("here: caches: expected a whole number"));
}

TEST(ResumedRun, OfItsOwnFolderCountsAsTheNewestFromThenOn) {
  const TemporaryFolder made;
  const std::string folder = made.file("run/checkpoints");
  const auto save = [](const std::string& in, int64_t step) {
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      checkpoint::save(in, step, {}, ranks.world());
    });
  };
  for (const int64_t step : {1, 2}) save(folder, step);
  save(made.file("other"), 1);
  const auto newest = [&] {
    return checkpoint::list_checkpoints(folder)[0].step;
  };
  const std::string first = folder + "/step-1";
  fs::copy(first, folder + "/step-1-kept");
  for (const std::string& resume :
       {std::string("auto"), made.file("other/step-1"), first + "-kept"}) {
    go_on_from(resume, folder);
    EXPECT_EQ(newest(), 2) << resume;
  }
  fs::create_directory_symlink(folder, made.file("link"));
  for (const std::string& resume :
       {first + "/", made.file("link/step-1"), fs::relative(first).string()}) {
    go_on_from(resume, folder);
    EXPECT_EQ(newest(), 1) << resume;
    fs::remove(folder + "/resumed-from");
  }
}

}  // namespace
}  // namespace tessera::train
