#include "tessera/train/model_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/models/hugging_face_config.h"
#include "tests/support/small_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

TEST(ModelFiles, ACopyThatDidNotEndIsNone) {
  const TemporaryFolder made;
  auto config = testing::small_run(/*ranks=*/1, /*zero_stage=*/0);
  config.run.dir = made.path();
  config.model.from = made.file("source");
  const fs::path source = config.model.from;
  write_file_atomic(source / "config.json",
                    models::hugging_face_config_json({.model = config.model}));
  write_file_atomic(source / "tokenizer.json", "{}");
  const RunFolder folder(config);
  const std::string kept = kept_model_files(folder.path());
  const auto start = [&](bool resumed) {
    keep_model_files(config, folder, resumed);
  };

  // What lies beside it while it is written would have too long a name.
  const fs::path too_long = source / std::string(255, 'x');
  fs::copy_file(source / "tokenizer.json", too_long);
  EXPECT_THROW(start(/*resumed=*/true), Error);
  EXPECT_FALSE(fs::exists(kept));
  fs::remove(too_long);
  write_file_atomic(kept + ".tmp/half", "");
  start(/*resumed=*/true);
  EXPECT_TRUE(fs::exists(kept + "/config.json"));
  EXPECT_TRUE(fs::exists(kept + "/tokenizer.json"));
  EXPECT_FALSE(fs::exists(kept + "/half"));
  EXPECT_FALSE(fs::exists(kept + ".tmp"));

  // A run that begins anew takes them anew, one that goes on what it has.
  fs::remove(source / "tokenizer.json");
  start(/*resumed=*/true);
  EXPECT_TRUE(fs::exists(kept + "/tokenizer.json"));
  start(/*resumed=*/false);
  EXPECT_FALSE(fs::exists(kept + "/tokenizer.json"));
}

}  // namespace
}  // namespace tessera::train
