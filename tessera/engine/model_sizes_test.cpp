#include "tessera/engine/model_sizes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/models/hugging_face_config.h"

namespace tessera::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ModelFolder : public ::testing::Test {
 protected:
  ModelFolder() {
    models::HuggingFaceConfig config;
    config.model.layers = 3;
    config.model.hidden = 64;
    config.model.complete();
    write_file_atomic(folder_.path() / "config.json",
                      models::hugging_face_config_json(config));
  }
  // A run with `model` beside the folder's name.
  RunConfig with(const std::string& model) {
    config::Provenance origins;
    RunConfig config =
        run_config_from_text(R"({"model": {"from": ")" +
                                 folder_.path().string() + "\"" + model + "}}",
                             "f", {}, &origins);
    read_model_folder(config, origins);
    return config;
  }
  TemporaryFolder folder_;
};

TEST_F(ModelFolder, GivesTheSizes) {
  const RunConfig config = with("");
  EXPECT_EQ(config.model.layers, 3);
  EXPECT_EQ(config.model.hidden, 64);
  EXPECT_EQ(config.model.head_dim, 8);
  // Written out, the sizes stand beside the folder and agree with it.
  config::Provenance origins;
  RunConfig again = run_config_from_text(to_json(config), "f", {}, &origins);
  read_model_folder(again, origins);
  EXPECT_EQ(to_json(again), to_json(config));
}

TEST_F(ModelFolder, RefusesAKeyThatContradictsIt) {
  EXPECT_EQ(with(", \"layers\": 3").model.layers, 3);
  EXPECT_THAT([&] { with(", \"layers\": 4"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("model.layers is 4 (f:1:"),
                                         HasSubstr("has 3. Leave the key "
                                                   "out."))));
}

TEST_F(ModelFolder, SequencesAreAsLongAsTheUserHasThem) {
  EXPECT_EQ(with("").model.max_seq, 1024);
  EXPECT_EQ(with(", \"max_seq\": 512").model.max_seq, 512);
  const auto longer =
      with(R"(, "max_seq": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0,
              "original_max_seq": 1024})");
  EXPECT_EQ(longer.model.max_seq, 4096);
  EXPECT_EQ(longer.model.rope_scaling.type, "yarn");
  EXPECT_EQ(longer.model.rope_scaling.original_max_seq, 1024);
}

TEST(ModelSizes, LearnedPositionsAreThoseOfTheFolder) {
  config::Provenance origins;
  RunConfig config = run_config_from_text(
      R"({"model": {"family": "gpt2", "max_seq": 64}})", "f", {}, &origins);
  models::ModelConfig folder = config.model;
  folder.max_seq = 32;
  EXPECT_THAT([&] { take_sizes(config, folder, origins); },
              ThrowsMessage<Error>(HasSubstr("model.max_seq is 64 (f:1:")));
}

TEST(ModelSizes, WeightsNeedAFolder) {
  RunConfig config;
  config.model.load_weights = true;
  EXPECT_THAT([&] { read_model_folder(config, {}); },
              ThrowsMessage<Error>(HasSubstr("model.from is empty")));
}

}  // namespace
}  // namespace tessera::engine
