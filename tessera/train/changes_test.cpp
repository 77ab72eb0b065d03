#include "tessera/train/changes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"
#include "tests/support/small_run.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

engine::RunConfig small() {
  return testing::small_run(/*ranks=*/2, /*zero_stage=*/0);
}

TEST(Changes, AreThoseThatDecideHowTrainingGoesOn) {
  auto config = small();
  const std::string before = to_json(config);
  config.optimizer.lr = 0.25;
  config.data.shuffle = false;
  config.data.weights = {1, 3};
  config.run.steps += 1;
  config.run.name = "other";
  config.comm.timeout_s = 7;
  EXPECT_THAT(
      trained_otherwise(before, to_json(config)),
      ElementsAre(HasSubstr("data.weights [] -> [1.0,3.0]"),
                  HasSubstr("data.shuffle true -> false"),
                  HasSubstr("optimizer.lr "), HasSubstr("keeps it as it was")));
}

TEST(Changes, ALongerRunBendsTheLearningRateUnlessItsScheduleStays) {
  auto config = small();
  config.run.steps = 10;
  const std::string before = to_json(config);
  config.run.steps = 20;
  EXPECT_THAT(trained_otherwise(before, to_json(config)),
              ElementsAre("the learning rate is scheduled over 20 steps "
                          "instead of 10 (run.steps); schedule.steps 10 keeps "
                          "it as it was"));
  config.schedule.steps = 10;
  EXPECT_THAT(trained_otherwise(before, to_json(config)), IsEmpty());
}

TEST(Changes, DocumentsThatAreKeptApartAreAnotherTraining) {
  auto config = small();
  const std::string before = to_json(config);
  config.data.intra_document_masking = true;
  EXPECT_THAT(trained_otherwise(before, to_json(config)),
              ElementsAre("data.intra_document_masking false -> true"));
}

// Else patience and checkpoint.keep_best would go by two measures.
TEST(Changes, LossesOfOtherSamplesOrWeightsAreNotCompared) {
  const auto is_other =
      [](const std::function<void(engine::RunConfig&)>& change,
         double valid_share = 0) {
        auto config = small();
        config.data.valid_share = valid_share;
        const std::string before = to_json(config);
        change(config);
        return validated_otherwise(before, to_json(config));
      };
  EXPECT_TRUE(is_other([](auto& config) { config.data.valid = {"other"}; }));
  EXPECT_TRUE(is_other([](auto& config) { config.data.seq_len = 8; }));
  EXPECT_TRUE(is_other([](auto& config) { config.data.loss_on = "all"; }));
  EXPECT_TRUE(is_other(
      [](auto& config) { config.data.intra_document_masking = true; }));
  EXPECT_TRUE(is_other([](auto& config) { config.validate.samples = 7; }));
  EXPECT_TRUE(is_other([](auto& config) { config.validate.ema = true; }));
  EXPECT_FALSE(is_other([](auto& config) {
    config.optimizer.lr = 0.25;
    config.data.shuffle = false;
    config.validate.every = 3;
  }));
  const auto trains_on_others = [](auto& config) {
    config.data.train = {"other"};
  };
  EXPECT_FALSE(is_other(trains_on_others));
  EXPECT_TRUE(is_other(trains_on_others, 0.25));
}

TEST(Changes, ACheckpointFolderHasOneRun) {
  auto config = small();
  const std::string before = to_json(config);
  EXPECT_NO_THROW(refuse_another_run(before, before));
  config.run.name = "other";
  EXPECT_THROW(refuse_another_run(before, to_json(config)), Error);
}

TEST(Changes, AnotherModelOfTheSameShapesIsRefused) {
  auto config = small();
  const std::string before = to_json(config);
  EXPECT_NO_THROW(refuse_another_model(before, before, "here"));
  config.model.rope_theta = 50;
  EXPECT_THAT(trained_otherwise(before, to_json(config)), IsEmpty());
  try {
    refuse_another_model(before, to_json(config), "here");
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("model.rope_theta 10000.0 -> 50.0"));
  }
}

TEST(Changes, WhatOnlyTrainsAModelIsTakenAndTold) {
  auto config = small();
  const std::string before = to_json(config);
  config.model.dropout = 0.5;
  config.model.moe.aux_loss = 0.5;
  EXPECT_NO_THROW(refuse_another_model(before, to_json(config), "here"));
  EXPECT_THAT(
      trained_otherwise(before, to_json(config)),
      ElementsAre(HasSubstr("model.dropout"), HasSubstr("model.moe.aux_loss")));
}

// What `change` on rank 1 makes every rank say.
std::vector<std::string> said(
    const std::function<void(engine::RunConfig&)>& change) {
  std::mutex mutex;
  std::vector<std::string> all;
  comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
    auto config = small();
    if (ranks.rank() == 1) change(config);
    try {
      compare_across(ranks.world(), to_json(config));
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex);
      all.emplace_back(error.what());
    }
  });
  return all;
}

TEST(Changes, WhatWasTakenCannotBeSkippedAnyMore) {
  const auto skipping = [](std::vector<std::string> batches) {
    auto config = small();
    config.data.skip = std::move(batches);
    return to_json(config);
  };
  const int64_t batch = small().batch.global;
  const auto refused = [&](const std::string& before, const std::string& now,
                           int64_t step, int64_t samples) {
    return testing::failure_of([&] {
      refuse_skipping_what_was_taken(before, now, step, samples, {});
    });
  };
  const std::string none = skipping({}), behind = skipping({"11:20"});
  EXPECT_EQ(refused(none, none, 10, 7), "");
  EXPECT_EQ(refused(none, behind, 10, 10 * batch), "");
  EXPECT_EQ(refused(behind, none, 10, 10 * batch), "");
  EXPECT_EQ(refused(behind, behind, 15, 15 * batch), "");
  EXPECT_EQ(refused(behind, skipping({"11:20", "26"}), 15, 15 * batch), "");
  // 11:20 went when the run was behind batch 10, by data.skip or by itself.
  EXPECT_THAT(testing::failure_of([&] {
                refuse_skipping_what_was_taken(none, skipping({"12"}), 11,
                                               11 * batch,
                                               {{10 * batch, 20 * batch}});
              }),
              "");
  EXPECT_THAT(refused(none, behind, 11, 11 * batch),
              HasSubstr("data.skip is 11:20, but the checkpoint after step 11 "
                        "was trained with none"));
  EXPECT_THAT(refused(behind, skipping({"11:20", "25"}), 15, 15 * batch),
              HasSubstr("was trained with 11:20"));
  EXPECT_THAT(refused(none, behind, 10, 10 * batch + 4),
              HasSubstr("Go on with the batch.global of all of them"));
}

TEST(Changes, RanksThatTrainDifferentlyAllSaySo) {
  const auto names =
      HasSubstr("rank 1 was started otherwise than rank 0: run.seed 0 -> 77.");
  EXPECT_THAT(said([](auto& config) { config.run.seed = 77; }),
              ElementsAre(names, names, names));
  EXPECT_THAT(said([](auto& config) {
                config.run.dir = "/elsewhere";
                config.data.train = {"/elsewhere/text"};
              }),
              IsEmpty());
}

}  // namespace
}  // namespace tessera::train
