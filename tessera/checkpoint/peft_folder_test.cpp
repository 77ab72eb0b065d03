#include "tessera/checkpoint/peft_folder.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

using tessera::detail::Json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class PeftFolder : public ::testing::Test {
 protected:
  PeftFolder() {
    const std::string layer = "base_model.model.model.layers.0.mlp.up_proj.";
    const std::vector<TensorSpec> tensors = {
        {layer + "lora_A.weight", at::kFloat, {2, 3}},
        {layer + "lora_B.weight", at::kFloat, {4, 2}}};
    write_safetensors(folder_.file("adapter_model.safetensors"), tensors, {},
                      [&](const std::string& name) {
                        const bool is_a = name == tensors[0].name;
                        return at::ones(tensors[is_a ? 0 : 1].shape);
                      });
  }

  // Of a configuration with `keys` in place of its own.
  models::LoraConfig read(const Json& base, const Json& keys) {
    Json config = base;
    config.update(keys);
    write_file_atomic(folder_.file("adapter_config.json"), config.dump());
    return read_peft_config(folder_.path());
  }

  TemporaryFolder folder_;
};

// As PEFT 0.21 writes one that nothing else is asked of.
Json plain() {
  return Json::parse(R"({
      "alora_invocation_tokens": null, "alpha_pattern": {},
      "arrow_config": null, "auto_mapping": null,
      "base_model_name_or_path": "model", "bias": "none",
      "corda_config": null, "ensure_weight_tying": false,
      "eva_config": null, "exclude_modules": null,
      "fan_in_fan_out": false, "inference_mode": true,
      "init_lora_weights": true, "kasa_config": null,
      "layer_replication": null, "layers_pattern": null,
      "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8,
      "lora_bias": false, "lora_dropout": 0.0, "lora_ga_config": null,
      "megatron_config": null, "megatron_core": "megatron.core",
      "modules_to_save": null, "monteclora_config": null,
      "peft_type": "LORA", "peft_version": "0.21.2",
      "qalora_group_size": 16, "r": 2, "rank_pattern": {},
      "revision": null, "target_modules": ["up_proj"],
      "target_parameters": null, "task_type": "CAUSAL_LM",
      "trainable_token_indices": null, "use_bdlora": null,
      "use_dora": false, "use_qalora": false, "use_rslora": false,
      "velora_config": null})");
}

// Of PEFT 0.2.
Json old() {
  return Json::parse(R"({
      "base_model_name_or_path": "model", "bias": "none",
      "enable_lora": null, "fan_in_fan_out": false, "inference_mode": true,
      "lora_alpha": 8, "lora_dropout": 0.0, "merge_weights": false,
      "modules_to_save": null, "peft_type": "LORA", "r": 2,
      "target_modules": ["up_proj"], "task_type": "CAUSAL_LM"})");
}

TEST_F(PeftFolder, PlainAdaptersAreTaken) {
  for (const Json& base : {plain(), old()}) {
    const auto lora = read(base, Json::object());
    EXPECT_EQ(lora.rank, 2);
    EXPECT_EQ(lora.alpha, 8);
    EXPECT_THAT(lora.targets, ElementsAre("model.layers.0.mlp.up_proj"));
  }
  // Of a beginning that is over, and of the model that they are for.
  EXPECT_EQ(read(plain(), {{"init_lora_weights", "gaussian"},
                           {"eva_config", {{"rho", 2.0}}},
                           {"auto_mapping", {{"base_model_class", "Llama"}}},
                           {"revision", "main"}})
                .rank,
            2);
}

// Also a key of a version that is still to come.
TEST_F(PeftFolder, AdaptersOfAnotherKindAreRefusedByName) {
  for (const auto& [key, value] :
       {std::pair<std::string, Json>{"alora_invocation_tokens", {5, 6}},
        {"use_dora", true},
        {"use_rslora", true},
        {"use_qalora", true},
        {"layers_to_transform", 0},
        {"rank_pattern", {{"up_proj", 1}}},
        {"kasa_config", {{"beta", 1e-4}}},
        {"trainable_token_indices", {1}},
        {"use_bdlora", {{"nblocks", 1}}},
        {"key_to_come", 0.5}}) {
    Json keys = Json::object();
    keys[key] = value;
    EXPECT_THAT(
        [&] { read(plain(), keys); },
        ThrowsMessage<Error>(AllOf(
            HasSubstr("adapter_config.json: " + key + " is " + value.dump()),
            HasSubstr("not supported"))));
  }
}

TEST_F(PeftFolder, WhatPeftTakesForExpertsIsNotSaved) {
  models::ModelConfig config;
  config.family = "qwen3_moe";
  config.layers = 2;
  config.hidden = 32;
  config.heads = 4;
  config.vocab = 61;
  config.moe.experts = 4;
  config.moe.every = 2;  // the first layer has none
  config.lora.rank = 2;
  const TemporaryFolder out;
  for (const char* target : {"q_proj", "down_proj"}) {
    config.lora.targets = {target};
    auto completed = config;
    completed.complete();
    const auto save = [&] {
      save_peft(
          out.path(), completed,
          [](const std::string& name, std::optional<int64_t>) {
            // q: 32 to 32, of rank 2
            return at::zeros(name.ends_with("A") ? std::vector<int64_t>{2, 32}
                                                 : std::vector<int64_t>{32, 2});
          },
          "model", at::kFloat);
    };
    if (std::string(target) == "q_proj") {
      EXPECT_NO_THROW(save());
    } else {
      EXPECT_THAT(save, ThrowsMessage<Error>(
                            AllOf(HasSubstr("model.layers.0.mlp.down_proj"),
                                  HasSubstr("convert --merge"))));
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint
