#include "tessera/models/hugging_face_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/small_models.h"

namespace tessera::models {
namespace {

TEST(HuggingFaceSource, BoxesOfAConv1dAreTurnedAndOffset) {
  const ModelConfig gpt2 = small_model("gpt2");  // of width 12
  const auto v = hugging_face_source(gpt2, "blocks.11.attention.v.weight");
  EXPECT_EQ(v.tensor, "transformer.h.11.attn.c_attn.weight");
  EXPECT_THAT(v.stored_shape({12, 12}), ::testing::ElementsAre(12, 36));
  const mesh::Box stored = v.stored_box({{2, 1}, {3, 4}});
  EXPECT_EQ(stored, (mesh::Box{{1, 26}, {4, 3}}));
  const auto bias = hugging_face_source(gpt2, "blocks.11.attention.k.bias");
  EXPECT_THAT(bias.stored_shape({12}), ::testing::ElementsAre(36));
  EXPECT_EQ(bias.stored_box({{2}, {3}}), (mesh::Box{{14}, {3}}));
}

// q of 12 rows, k and v of 4 each; gate and up of 20.
TEST(HuggingFaceSource, PartsMayBeUnequal) {
  const ModelConfig phi = small_model("phi3");
  const auto source = [&](const char* name) {
    return hugging_face_source(phi, std::string("blocks.1.") + name);
  };
  const auto q = source("attention.q.weight"), v = source("attention.v.weight");
  EXPECT_EQ(q.tensor, "model.layers.1.self_attn.qkv_proj.weight");
  EXPECT_EQ(v.tensor, q.tensor);
  EXPECT_THAT(q.stored_shape({12, 12}), ::testing::ElementsAre(20, 12));
  EXPECT_THAT(v.stored_shape({4, 12}), ::testing::ElementsAre(20, 12));
  EXPECT_EQ(q.stored_box({{2, 0}, {3, 12}}), (mesh::Box{{2, 0}, {3, 12}}));
  EXPECT_EQ(v.stored_box({{2, 1}, {2, 4}}), (mesh::Box{{18, 1}, {2, 4}}));
  const auto up = source("mlp.up.weight");
  EXPECT_EQ(up.tensor, "model.layers.1.mlp.gate_up_proj.weight");
  EXPECT_EQ(up.stored_box({{5, 0}, {5, 12}}), (mesh::Box{{25, 0}, {5, 12}}));
}

TEST(HuggingFaceSource, ModulesAhead) {
  ModelConfig model = small_model("deepseek_v3");
  model.mtp.layers = 1;
  model.complete();
  const auto place = [&](const char* name) {
    return hugging_face_source(model, name).tensor;
  };
  EXPECT_EQ(place("blocks.2.mtp.proj.weight"), "model.layers.2.eh_proj.weight");
  EXPECT_EQ(place("blocks.2.mtp.norm.weight"),
            "model.layers.2.shared_head.norm.weight");
  const auto copies = hugging_face_copies(model);
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].tensor, "model.layers.2.embed_tokens.weight");
  EXPECT_EQ(copies[1].tensor, "model.layers.2.shared_head.head.weight");
  EXPECT_EQ(copies[1].parameter, "embed.tokens.weight");  // tied
  EXPECT_FALSE(is_of_module_left_out(model, copies[0].tensor));
  model.mtp.layers = 0;
  EXPECT_TRUE(is_of_module_left_out(model, copies[0].tensor));
  EXPECT_FALSE(is_of_module_left_out(model, "model.layers.1.enorm.weight"));
}

}  // namespace
}  // namespace tessera::models
