#include "tessera/models/hugging_face_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tests/support/small_models.h"

namespace tessera::models {
namespace {

// With one more key.
std::string gemma3(const std::string& key) {
  return R"({"model_type": "gemma3_text", "vocab_size": 5, "hidden_size": 8,
             "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 4, "max_position_embeddings": 8, )" +
         key + "}";
}
std::string phi3(const std::string& key) {
  return R"({"model_type": "phi3", "vocab_size": 5, "hidden_size": 8,
             "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 4, "max_position_embeddings": 8, )" +
         key + "}";
}

// The keys of folders as they are published, from before rope_parameters.
TEST(HuggingFaceConfigOf, Gemma3) {
  const auto read = [](const std::string& more) {
    return parse_hugging_face_config(
               R"({"model_type": "gemma3_text", "attention_bias": false,
                   "attn_logit_softcapping": null,
                   "final_logit_softcapping": null, "head_dim": 256,
                   "hidden_activation": "gelu_pytorch_tanh",
                   "hidden_size": 1152, "intermediate_size": 6912,
                   "max_position_embeddings": 32768,
                   "num_attention_heads": 4, "num_hidden_layers": 26,
                   "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
                   "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
                   "rope_theta": 1000000, "sliding_window": 512,
                   "sliding_window_pattern": 6, "vocab_size": 262144, )" +
                   more + "}",
               "config.json")
        .model;
  };
  const ModelConfig one = read(R"("rope_scaling": null)");
  EXPECT_EQ(num_parameters(one), 999885952);  // of 1 billion
  EXPECT_EQ(one.window_of(4), 512);
  EXPECT_EQ(one.window_of(5), 0);
  EXPECT_EQ(one.rope_theta, 1e6);
  EXPECT_EQ(one.rope_theta_local, 1e4);
  EXPECT_TRUE(one.tie_embeddings);
  EXPECT_EQ(one.query_scale(), 1);
  const ModelConfig longer =
      read(R"("rope_scaling": {"factor": 8.0, "rope_type": "linear"})");
  EXPECT_EQ(longer.rope_scaling.type, "linear");
  EXPECT_EQ(longer.rope_scaling.factor, 8);
  EXPECT_EQ(longer.rope_theta_local, 1e4);
}

// As transformers reads an object of each kind of layer.
TEST(HuggingFaceConfigOf, YarnOfGemma3) {
  const auto read = [](const std::string& more) {
    return parse_hugging_face_config(
               gemma3(R"("original_max_position_embeddings": 2,
                         "rope_parameters": {"truncate": false,
                           "full_attention": {"rope_type": "yarn",
                                              "factor": 2.0)" +
                      more + "}}"),
               "config.json")
        .model;
  };
  const ModelConfig config = read(R"(, "original_max_position_embeddings": 4)");
  EXPECT_EQ(config.rope_scaling.original_max_seq, 4);
  EXPECT_FALSE(config.rope_scaling.truncate);
  EXPECT_EQ(read("").rope_scaling.original_max_seq, 8);
  const auto back = parse_hugging_face_config(
      hugging_face_config_json({.model = config}), "text");
  EXPECT_EQ(back.model.rope_scaling, config.rope_scaling);
}

TEST(HuggingFaceConfigOf, Phi4) {
  const auto config = parse_hugging_face_config(
      R"({"model_type": "phi3", "attention_bias": false, "embd_pdrop": 0.0,
          "hidden_act": "silu", "hidden_size": 5120,
          "intermediate_size": 17920, "max_position_embeddings": 16384,
          "num_attention_heads": 40, "num_hidden_layers": 40,
          "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
          "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
          "rope_theta": 250000, "sliding_window": null,
          "tie_word_embeddings": false, "vocab_size": 100352})",
      "config.json");
  EXPECT_EQ(num_parameters(config.model), 14659507200);
  EXPECT_EQ(config.model.rope_theta, 250000);
  EXPECT_EQ(config.model.window, 0);
}

// What a folder leaves out is transformers' default of that family.
TEST(HuggingFaceConfigOf, MixtralWithSizesAlone) {
  const ModelConfig config =
      parse_hugging_face_config(
          R"({"model_type": "mixtral", "vocab_size": 50, "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 16,
              "num_local_experts": 4,
              "intermediate_size": 4, "max_position_embeddings": 32})",
          "config.json")
          .model;
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.kv_heads, 8);
}

TEST(HuggingFaceConfigOf, QwenWithSizesAlone) {
  const auto read = [](const std::string& family, const std::string& more) {
    return parse_hugging_face_config(
               R"({"model_type": ")" + family +
                   R"(", "vocab_size": 50, "hidden_size": 128,
                   "num_hidden_layers": 2, "num_attention_heads": 64,
                   "intermediate_size": 4, "max_position_embeddings": 32)" +
                   more + "}",
               "config.json")
        .model;
  };
  const ModelConfig config = read("qwen3", "");
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(read("qwen2", R"(, "num_key_value_heads": 4)").kv_heads, 4);
  EXPECT_EQ(read("qwen2", "").head_dim, 2);
  // As many as heads.
  EXPECT_EQ(read("qwen3", R"(, "num_key_value_heads": null)").kv_heads, 64);
}

// Where a folder has no tokenizer that says it, and transformers' own default
// is a token.
TEST(HuggingFaceConfigOf, NoTokenIsPaddingUnlessItIsSaid) {
  for (const char* family : {"olmo2", "gemma3_text", "phi3"}) {
    EXPECT_THAT(hugging_face_config_json({.model = small_model(family)}),
                ::testing::HasSubstr("\"pad_token_id\": null"))
        << family;
  }
}

// Of a tokenizer of the run's own, also where some have the same numbers.
TEST(HuggingFaceConfigOf, TokensOfAnotherTokenizerAreNotKept) {
  const auto config_of = [](const std::string& text) {
    return tessera::detail::parse_json(text, "config.json");
  };
  for (const char* family : {"llama", "gemma3_text"}) {
    HuggingFaceConfig config{
        .model = small_model(family), .bos_token = 3, .eos_tokens = {4, 5}};
    auto text = config_of(hugging_face_config_json(config));
    text["pad_token_id"] = 0;
    const auto updated = [&](bool has_its_tokenizer) {
      return config_of(updated_hugging_face_config(text.dump(), "config.json",
                                                   config, has_its_tokenizer));
    };
    EXPECT_EQ(updated(true), text);
    auto other = text;
    other["pad_token_id"] = nullptr;
    EXPECT_EQ(updated(false), other);
    config.bos_token = std::nullopt;
    config.eos_tokens.clear();
    other["bos_token_id"] = other["eos_token_id"] = nullptr;
    EXPECT_EQ(updated(false), other);
    EXPECT_EQ(config_of(updated_generation_config(
                  R"({"eos_token_id": 4, "top_k": 9})", "generation", config,
                  /*has_its_tokenizer=*/false)),
              config_of(R"({"eos_token_id": null, "top_k": 9,
                            "bos_token_id": null})"));
  }
}

TEST(HuggingFaceConfigOf, AnEmptyScalingIsNone) {
  const ModelConfig config =
      parse_hugging_face_config(
          R"({"model_type": "llama", "vocab_size": 50, "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 4, "max_position_embeddings": 32,
              "rope_scaling": {}, "rope_parameters": {
                "rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}})",
          "config.json")
          .model;
  EXPECT_EQ(config.rope_scaling.factor, 4);
  EXPECT_EQ(config.rope_theta, 7);
}

// A folder that others made, with one more key, whose sequences get longer.
TEST(HuggingFaceConfigOf, LongerSequences) {
  const auto text = [](const std::string& key) {
    return R"({"model_type": "llama", "vocab_size": 5, "hidden_size": 8,
               "num_hidden_layers": 4, "num_attention_heads": 4,
               "intermediate_size": 4, "max_position_embeddings": 32,
               "house_key": 7, )" +
           key + "}";
  };
  const auto updated = [](const std::string& before,
                          const HuggingFaceConfig& config) {
    return updated_hugging_face_config(before, "config.json", config,
                                       /*has_its_tokenizer=*/true);
  };
  const std::string plain = text(R"("rope_theta": 50.0)");
  auto config = parse_hugging_face_config(plain, "config.json");
  EXPECT_EQ(updated(plain, config), plain);
  config.model.max_seq = 64;
  config.model.rope_scaling.type = "yarn";
  config.model.rope_scaling.factor = 2;
  config.model.rope_scaling.original_max_seq = 32;
  const std::string longer = updated(plain, config);
  EXPECT_THAT(longer, ::testing::HasSubstr("\"house_key\": 7"));
  const auto back = parse_hugging_face_config(longer, "config.json").model;
  EXPECT_EQ(back.max_seq, 64);
  EXPECT_EQ(back.rope_theta, 50);
  EXPECT_EQ(back.rope_scaling, config.model.rope_scaling);

  // A factor, and a length before, that max_position_embeddings gave.
  for (const std::string key :
       {R"("original_max_position_embeddings": 16,
           "rope_scaling": {"type": "yarn"})",
        R"("rope_scaling": {"type": "yarn", "factor": 4.0})",
        R"("rope_parameters": {"rope_type": "llama3", "factor": 4.0})"}) {
    config = parse_hugging_face_config(text(key), "config.json");
    config.model.max_seq = 48;
    const auto again =
        parse_hugging_face_config(updated(text(key), config), "config.json")
            .model;
    EXPECT_EQ(again.max_seq, 48) << key;
    EXPECT_EQ(again.rope_scaling, config.model.rope_scaling) << key;
  }
}

// What says which layers have one, in config.json and back.
TEST(HuggingFaceConfigOf, PatternsOfWindows) {
  const auto read = [](const std::string& more, const char* family = "qwen3",
                       int64_t layers = 6) {
    ModelConfig config = small_model(family);
    config.layers = layers;
    auto said = tessera::detail::parse_json(
        hugging_face_config_json({.model = config}), "text");
    said.update(tessera::detail::parse_json("{" + more + "}", "more"));
    return parse_hugging_face_config(said.dump(), "text").model;
  };
  const auto expect = [](const ModelConfig& found, int64_t window,
                         int64_t every, int64_t first_full) {
    EXPECT_EQ(found.window, window);
    EXPECT_EQ(found.window_every, every);
    EXPECT_EQ(found.window_first_full, first_full);
    const auto back = parse_hugging_face_config(
        hugging_face_config_json({.model = found}), "text");
    EXPECT_EQ(back.model.window, window);
    EXPECT_EQ(back.model.window_every, every);
    EXPECT_EQ(back.model.window_first_full, first_full);
  };
  const std::string in_use = R"("use_sliding_window": true)";
  const std::string four = in_use + R"(, "sliding_window": 4)";
  expect(read(four), 0, 0, 0);  // behind 28 layers
  expect(read(four + R"(, "max_window_layers": 2)"), 4, 0, 2);
  expect(read(four + R"(, "max_window_layers": 0)"), 4, 0, 0);
  expect(read(in_use + R"(, "max_window_layers": 0)"), 4096, 0, 0);
  expect(read(R"("sliding_window": 4, "max_window_layers": 0)"), 0, 0, 0);
  const auto listed = [&](const std::string& layers) {
    std::string types;
    for (const char layer : layers) {
      types +=
          std::string(types.empty() ? "" : ", ") +
          (layer == 's' ? R"("sliding_attention")" : R"("full_attention")");
    }
    return four + R"(, "layer_types": [)" + types + "]";
  };
  expect(read(listed("ssssss")), 4, 0, 0);
  expect(read(listed("sfsfsf")), 4, 2, 0);
  expect(read(listed("sssssf")), 4, 6, 0);
  expect(read(listed("ffssss")), 4, 0, 2);
  expect(read(listed("ffsfss")), 4, 4, 2);
  expect(read(listed("ffffff")), 0, 0, 0);
  EXPECT_THROW(read(listed("sffsss")), tessera::Error);
  EXPECT_THROW(read(listed("sss")), tessera::Error);
  expect(read(R"("sliding_window": null)", "mistral"), 0, 0, 0);
  expect(read(R"("sliding_window": 8)", "mistral"), 8, 0, 0);
  expect(read(R"("sliding_window": 8)", "mixtral"), 8, 0, 0);
  EXPECT_THROW(read(listed("sfsfsf"), "mistral"), tessera::Error);
  EXPECT_THROW(read(four, "llama"), tessera::Error);
}

struct BadConfig {
  std::string name;
  std::string json;
  std::string named;  // in the message
};

class BadConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, IsRefusedByName) {
  try {
    parse_hugging_face_config(GetParam().json, "config.json");
    FAIL() << "was accepted";
  } catch (const tessera::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                ::testing::HasSubstr(GetParam().named));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadConfigTest,
    ::testing::Values(
        BadConfig{"no_object", "[]", "object"},
        BadConfig{"no_type", "{}", "model_type"},
        BadConfig{"no_size", R"({"model_type": "gpt2", "vocab_size": 5})",
                  "n_layer"},
        BadConfig{"negative_size",
                  R"({"model_type": "gpt2", "vocab_size": -5})", "vocab_size"},
        BadConfig{"broken_size", R"({"model_type": "gpt2", "vocab_size": 5.5})",
                  "vocab_size"},
        BadConfig{"huge_size", R"({"model_type": "gpt2", "vocab_size": 1e30})",
                  "vocab_size"},
        BadConfig{
            "too_large",
            R"({"model_type": "gpt2", "vocab_size": 4611686018427387904})",
            "vocab_size"},
        BadConfig{"too_many_layers",
                  R"({"model_type": "gpt2", "vocab_size": 5,
                      "n_layer": 16777216})",
                  "n_layer is 16777216; it must be at most 10000"},
        BadConfig{"negative_epsilon",
                  R"({"model_type": "gpt2", "vocab_size": 5, "n_layer": 1,
                      "n_embd": 4, "n_head": 1, "n_positions": 4,
                      "layer_norm_epsilon": -1})",
                  "layer_norm_epsilon is -1; it must be above 0"},
        BadConfig{"gpt_oss", R"({"model_type": "gpt_oss"})", "MXFP4"},
        BadConfig{"softcapping", gemma3("\"attn_logit_softcapping\": 50.0"),
                  "attn_logit_softcapping is 50.0, which is not supported"},
        BadConfig{"softcapping_of_logits",
                  gemma3("\"final_logit_softcapping\": 30.0"),
                  "final_logit_softcapping is 30.0, which is not supported"},
        BadConfig{"both_ways", gemma3("\"use_bidirectional_attention\": true"),
                  "use_bidirectional_attention is true"},
        BadConfig{"another_gate", gemma3("\"hidden_activation\": \"gelu\""),
                  "hidden_activation is \"gelu\""},
        BadConfig{"no_pattern", gemma3(R"("layer_types": ["sliding_attention",
                            "full_attention", "full_attention",
                            "sliding_attention"])"),
                  "layer_types is [\"sliding_attention\",\"full"},
        BadConfig{"unknown_layers",
                  gemma3(R"("layer_types": ["linear_attention",
                            "full_attention", "full_attention",
                            "full_attention"])"),
                  "layer_types is [\"linear_attention\""},
        BadConfig{"too_few_layers",
                  gemma3(R"("layer_types": ["full_attention"])"),
                  "layer_types is [\"full_attention\"]"},
        BadConfig{"scaled_windows", gemma3(R"("rope_parameters": {
                      "sliding_attention": {"rope_type": "linear",
                                            "factor": 2.0}})"),
                  "sliding_attention: rope_type is \"linear\""},
        BadConfig{"truncate_of_a_kind", gemma3(R"("rope_parameters": {
                      "full_attention": {"rope_type": "yarn", "factor": 2.0,
                                         "truncate": false}})"),
                  "full_attention: truncate is false, which is not supported"},
        BadConfig{"truncate_of_a_scaling", gemma3(R"("rope_scaling": {
                      "rope_type": "yarn", "factor": 2.0, "truncate": false})"),
                  "full_attention: truncate is false"},
        BadConfig{"longrope", phi3(R"("rope_scaling": {"type": "longrope",
                      "short_factor": [1.0], "long_factor": [1.0]})"),
                  "rope_scaling: type is \"longrope\", whose frequencies "
                  "change with the length"},
        BadConfig{"scaled_phi", phi3(R"("rope_parameters":
                      {"rope_type": "yarn", "factor": 2.0})"),
                  "rope_parameters: rope_type is \"yarn\""},
        BadConfig{"partial_rotary", phi3("\"partial_rotary_factor\": 0.75"),
                  "partial_rotary_factor is 0.75, which is not supported"},
        BadConfig{"nul", std::string("{}\0{}", 5), "a NUL byte"},
        BadConfig{"not_json", "{\"model_type\": ", "config.json"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::models
