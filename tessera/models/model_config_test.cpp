#include "tessera/models/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/models/model.h"
#include "tests/support/experts.h"
#include "tests/support/failure_of.h"
#include "tests/support/small_models.h"

namespace tessera::models {
namespace {

std::string refusal_of(ModelConfig config) {
  return tessera::testing::failure_of([&] { config.complete(); });
}

// GPT-2's published sizes: 124,439,808 parameters.
TEST(ModelConfigOf, CountsTheParametersOfGpt2) {
  ModelConfig config;
  config.family = "gpt2";
  config.layers = 12;
  config.hidden = 768;
  config.heads = 12;
  config.vocab = 50257;
  config.max_seq = 1024;
  EXPECT_EQ(num_parameters(config), 124439808);
  // 12 layers of 12 * 768^2 weights, and the tied head.
  const int64_t multiplied = 12 * 12 * 768 * 768 + 50257 * 768;
  EXPECT_EQ(flops_per_token(config, 1024),
            6 * multiplied + 12 * 12 * 12 * 64 * 1024);
}

// Mixtral 8x7B: 46.7 billion parameters, of which 12.9 work on a token.
TEST(ModelConfigOf, ExpertsOfMixtral) {
  ModelConfig config;
  config.family = "mixtral";
  config.layers = 32;
  config.hidden = 4096;
  config.heads = 32;
  config.kv_heads = 8;
  config.ffn = 14336;
  config.vocab = 32000;
  config.max_seq = 32768;
  config.tie_embeddings = false;
  EXPECT_EQ(num_parameters(config), 46702792704);
  EXPECT_EQ(num_expert_parameters(config), int64_t{32} * 8 * 3 * 4096 * 14336);
  const int64_t active = 46702792704 - int64_t{32} * 6 * 3 * 4096 * 14336;
  EXPECT_EQ(active, 12879925248);
  EXPECT_EQ(count_parameters(config).active, active);
  EXPECT_EQ(describe(config),
            "mixtral, 46.7B parameters, 12.9B of them active");
  const int64_t norms = (2 * 32 + 1) * 4096, lookup = 32000 * 4096;
  EXPECT_EQ(flops_per_token(config, 0), 6 * (active - norms - lookup));

  config.layers = 4;
  config.moe.every = 2;
  config.complete();
  EXPECT_EQ(config.layers_with_experts(), 2);
  EXPECT_FALSE(config.has_experts(0));
  EXPECT_TRUE(config.has_experts(3));
}

TEST(ModelConfigOf, ModulesAheadAreLikeTheLastLayer) {
  ModelConfig model = small_model("deepseek_v3");
  model.layers = 4;
  model.moe.every = 2;
  model.mtp.layers = 2;
  model.complete();
  EXPECT_TRUE(model.has_experts(4));
  EXPECT_TRUE(model.has_experts(5));
  EXPECT_EQ(model.layers_with_experts(), 4);
  EXPECT_EQ(model.layers_with_experts(4), 2);
  EXPECT_EQ(model.layers_with_experts(5), 3);
  model.layers = 3;
  EXPECT_FALSE(model.has_experts(4));
  EXPECT_EQ(model.layers_with_experts(), 1);
}

TEST(ModelConfigOf, WindowsOfLayers) {
  ModelConfig config = small_model("qwen3");
  config.layers = 12;
  config.window = 5;
  config.complete();
  const auto full = [&] {
    std::vector<int64_t> layers;
    for (int64_t i = 0; i < config.layers; ++i) {
      if (config.window_of(i) == 0) layers.push_back(i);
    }
    return layers;
  };
  EXPECT_THAT(full(), ::testing::IsEmpty());
  config.window_every = 6;
  EXPECT_THAT(full(), ::testing::ElementsAre(5, 11));
  config.window_first_full = 2;
  EXPECT_THAT(full(), ::testing::ElementsAre(0, 1, 5, 11));

  const ModelConfig plain = small_model("qwen3");
  const auto flops = [](ModelConfig of, int64_t window) {
    of.window = window;
    return flops_per_token(of, 16);
  };
  const int64_t each = 6 * plain.heads * 2 * plain.head_dim * plain.layers;
  EXPECT_EQ(flops(plain, 0) - flops(plain, 5), 11 * each);
  EXPECT_EQ(flops(plain, 0), flops(plain, 40));
}

TEST(ModelConfigOf, WindowsThatDoNotFitAreRefused) {
  const auto refused = [](const char* family, int64_t window, int64_t every,
                          int64_t first_full) {
    ModelConfig config = small_model(family);
    config.window = window;
    config.window_every = every;
    config.window_first_full = first_full;
    EXPECT_THROW(config.complete(), tessera::Error) << family << every;
  };
  refused("llama", 4, 0, 0);
  refused("mistral", 4, 2, 0);
  refused("mistral", 4, 0, 1);
  refused("qwen2", 4, 1, 0);
  refused("qwen2", 4, 0, 2);
  small_model("llama").complete();
}

TEST(ModelConfigOf, KeysOfOtherFamiliesAreRefused) {
  const auto expect_refused = [](const std::string& family, auto change,
                                 const char* named) {
    ModelConfig config = small_model(family);
    change(config);
    EXPECT_THAT(refusal_of(config), ::testing::HasSubstr(named));
  };
  expect_refused(
      "llama", [](ModelConfig& of) { of.query_pre_attn_scalar = 5; },
      "model.query_pre_attn_scalar is 5, but scores of model.family llama");
  expect_refused(
      "llama", [](ModelConfig& of) { of.rope_theta_local = 5; },
      "model.rope_theta_local is 5, but all layers of model.family llama");
  expect_refused(
      "gemma3_text", [](ModelConfig& of) { of.rope_theta_local = 0.5; },
      "model.rope_theta_local is 0.5; a base must be above 1");
  expect_refused(
      "gemma3_text", [](ModelConfig& of) { of.window = 0; },
      "model.rope_theta_local is 50, but no layer has a window");
}

// Each size by itself is one that may be.
TEST(ModelConfigOf, MoreParametersThanCanBeCountedAreRefused) {
  ModelConfig config;
  config.layers = 10000;
  config.hidden = config.ffn = 1 << 24;
  config.heads = 1 << 10;
  try {
    config.complete();
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr("can be counted"));
  }
}

// In latent attention, and in the blocks of modules ahead.
TEST(ModelConfigOf, EveryMatrixIsCounted) {
  ModelConfig config;
  config.family = "deepseek_v3";
  config.hidden = 4096;
  config.heads = 1 << 10;
  config.head_dim = 128;
  config.layers = 100;
  EXPECT_EQ(refusal_of(config), "");
  config.latent.kv_rank = 1 << 24;  // 3e12 in a layer
  EXPECT_EQ(refusal_of(config), "");
  config.layers = 320;
  EXPECT_EQ(refusal_of(config), "");
  config.mtp.layers = 64;
  EXPECT_THAT(refusal_of(config), ::testing::HasSubstr("can be counted"));
}

TEST(ModelConfigOf, MoreOperationsThanCanBeCountedAreRefused) {
  ModelConfig config;
  config.layers = 10000;
  config.hidden = 64;
  config.heads = 1 << 20;
  config.head_dim = 2;
  EXPECT_EQ(refusal_of(config), "");
  config.max_seq = 1 << 24;
  EXPECT_THAT(refusal_of(config),
              ::testing::HasSubstr("attention of a token over model.max_seq "
                                   "16777216 takes some"));
}

}  // namespace
}  // namespace tessera::models
