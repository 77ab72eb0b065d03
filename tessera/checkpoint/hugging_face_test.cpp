#include "tessera/checkpoint/hugging_face.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/mesh/slice.h"
#include "tessera/models/decoder.h"
#include "tests/support/failure_of.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using mesh::Axis;
using mesh::Placement;

models::HuggingFaceConfig small(const std::string& family) {
  models::HuggingFaceConfig config;
  config.model.family = family;
  config.model.layers = 2;
  config.model.hidden = 12;
  config.model.heads = 2;
  config.model.kv_heads = family == "gpt2" ? 2 : 1;
  config.model.ffn = 20;
  config.model.vocab = 31;
  config.model.max_seq = 16;
  config.model.tie_embeddings = family != "llama";
  config.model.complete();
  return config;
}

class HuggingFaceTest : public ::testing::TestWithParam<std::string> {
 protected:
  HuggingFaceTest() : config_(small(GetParam())), decoder_(config_.model) {
    nn::materialise(decoder_, {.seed = 3});
    const at::NoGradGuard no_grad;
    for (auto& parameter : nn::parameters_of(decoder_)) {
      parameter.tensor.add_(at::randn_like(parameter.tensor));
    }
  }

  // That what the folder holds is the decoder.
  void expect_loaded() {
    const auto back = model_from_hugging_face(folder_.path(), at::kFloat);
    const auto expected = nn::parameters_of(decoder_);
    const auto found = nn::parameters_of(*back);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i].tensor, expected[i].tensor))
          << found[i].name;
    }
  }

  TemporaryFolder folder_;
  models::HuggingFaceConfig config_;
  models::Decoder decoder_;
};

TEST_P(HuggingFaceTest, WhatIsSavedIsLoaded) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  EXPECT_TRUE(is_hugging_face_folder(folder_.path()));
  expect_loaded();
}

TEST_P(HuggingFaceTest, ParametersAreReadOneByOne) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  const auto read = parameters_in(folder_.path(), config_.model, at::kDouble);
  for (const auto& parameter : nn::parameters_of(decoder_)) {
    const at::Tensor expected = parameter.tensor.detach().to(at::kDouble);
    const auto experts =
        nn::names_of_experts(parameter.name, parameter.spec->layout).size();
    if (experts == 0) {
      EXPECT_TRUE(at::equal(read(parameter.name, {}), expected))
          << parameter.name;
    }
    for (size_t i = 0; i < experts; ++i) {
      const auto expert = static_cast<int64_t>(i);
      EXPECT_TRUE(at::equal(read(parameter.name, expert), expected[expert]))
          << parameter.name << " " << i;
    }
  }
}

TEST_P(HuggingFaceTest, WhatIsWrittenToMeanwhileIsRefused) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  const auto read = parameters_in(folder_.path(), config_.model, at::kDouble);
  const std::string name = nn::parameters_of(decoder_).front().name;
  EXPECT_NO_THROW(read(name, {}));
  const fs::path file = folder_.path() / "model.safetensors";
  const auto before = fs::last_write_time(file);
  std::fstream(file, std::ios::in | std::ios::out).seekp(-1, std::ios::end)
      << 'A';
  fs::last_write_time(file, before + std::chrono::seconds(1));
  EXPECT_THAT(tessera::testing::failure_of([&] { read(name, {}); }),
              ::testing::HasSubstr("was written to while it was read"));
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  EXPECT_NO_THROW(read(name, {}));  // another file, in its place
}

TEST_P(HuggingFaceTest, SavingAgainReplacesTheFolder) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  config_.dtype = at::kBFloat16;
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  EXPECT_EQ(models::read_hugging_face_config(folder_.path()).dtype,
            at::kBFloat16);
  const SafetensorsFile file(folder_.file("model.safetensors"));
  for (const auto& entry : file.tensors()) {
    EXPECT_EQ(entry.dtype, at::kBFloat16);
  }
}

// Every rank of any mesh reads the boxes of the whole, and no others.
TEST_P(HuggingFaceTest, RanksReadTheirBoxes) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  const auto whole = nn::parameters_of(decoder_);
  for (const auto& degrees :
       {mesh::Degrees{.dp_shard = 5}, mesh::Degrees{.dp_shard = 2, .tp = 2},
        mesh::Degrees{.dp_shard = 4, .ep = 2}}) {
    const int64_t world = degrees.dp_shard * degrees.tp;
    const mesh::DeviceMesh mesh(degrees, world);
    for (int64_t rank = 0; rank < world; ++rank) {
      models::Decoder part(config_.model);
      const auto parameters = nn::parameters_of(part);
      for (const auto& parameter : parameters) {
        auto& layout = parameter.spec->layout;
        const auto dims = static_cast<int64_t>(layout.global_shape().size());
        const bool is_of_expert = layout.is_of_expert();
        layout =
            layout.with(layout.data_axis(), Placement::shard(layout.data_dim()))
                .with(is_of_expert ? Axis::kEp : Axis::kTp,
                      Placement::shard(is_of_expert ? 0 : dims - 1));
      }
      const auto coord = mesh.coord_of(rank);
      nn::materialise(part, mesh, coord, {.fill = false});
      load_hugging_face(folder_.path(), part, mesh, coord);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto box = parameters[i].spec->layout.local_box(mesh, coord);
        EXPECT_TRUE(
            at::equal(parameters[i].tensor, mesh::slice(whole[i].tensor, box)))
            << parameters[i].name << " on " << mesh.describe(rank);
      }
    }
  }
}

TEST_P(HuggingFaceTest, ANumberBeyondTheDtypeIsRefused) {
  const auto parameters = nn::parameters_of(decoder_);
  const at::Tensor weight = parameters.front().tensor.detach();
  const auto save_with = [&](double value, at::ScalarType dtype) {
    weight.view(-1)[1].fill_(value);
    config_.dtype = dtype;
    save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  };
  save_with(-65504, at::kHalf);  // the largest that it has
  save_with(-70000, at::kBFloat16);
  save_with(std::numeric_limits<double>::infinity(), at::kHalf);
  try {
    save_with(-70000, at::kHalf);
    FAIL() << "was accepted";
  } catch (const tessera::Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::AllOf(::testing::HasSubstr(parameters.front().name),
                                 ::testing::HasSubstr("70000")));
  }
}

TEST_P(HuggingFaceTest, SizesThatTheFilesDoNotBearOutAreRefused) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  config_.model.vocab = 16'000'000;  // 768 MB, were they taken
  write_file_atomic(folder_.file("config.json"),
                    hugging_face_config_json(config_));
  try {
    model_from_hugging_face(folder_.path(), at::kFloat);
    FAIL() << "was accepted";
  } catch (const tessera::Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr("16000000"));
  }
}

// As transformers leaves a folder that had several files before; of an older
// version those are still there.
TEST_P(HuggingFaceTest, ASingleFileCountsBeforeAnIndex) {
  models::Decoder older(config_.model);
  nn::materialise(older, {.seed = 4});
  save_hugging_face(folder_.path(), config_, parameters_of(older));
  const std::string shard = "model-00001-of-00001.safetensors";
  fs::rename(folder_.file("model.safetensors"), folder_.file(shard));
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  write_file_atomic(folder_.file("model.safetensors.index.json"),
                    R"({"weight_map": {"x": ")" + shard + R"("}})");
  expect_loaded();
  fs::remove(folder_.file(shard));
  expect_loaded();
}

TEST_P(HuggingFaceTest, AnIndexDoesNotLeaveTheFolder) {
  save_hugging_face(folder_.path(), config_, parameters_of(decoder_));
  fs::remove(folder_.file("model.safetensors"));
  for (const std::string file : {"../model.safetensors", "/etc/passwd", ".."}) {
    write_file_atomic(folder_.file("model.safetensors.index.json"),
                      R"({"weight_map": {"x": ")" + file + R"("}})");
    EXPECT_THROW(load_hugging_face(folder_.path(), decoder_), tessera::Error)
        << file;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, HuggingFaceTest,
                         ::testing::Values("gpt2", "llama", "qwen2", "qwen3",
                                           "olmo2", "gemma3_text", "phi3"),
                         [](const auto& info) { return info.param; });

TEST(HuggingFaceFolder, WhatIsNoModelIsToldApart) {
  const TemporaryFolder folder;
  EXPECT_FALSE(is_hugging_face_folder(folder.path()));
  EXPECT_FALSE(is_hugging_face_folder(folder.file("nothing")));
  write_file_atomic(folder.file("config.json"), "{}");
  EXPECT_FALSE(is_hugging_face_folder(folder.path()));
}

}  // namespace
}  // namespace tessera::checkpoint
