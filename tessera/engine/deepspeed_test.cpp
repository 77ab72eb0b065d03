#include "tessera/engine/deepspeed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/engine/detail/deepspeed_keys.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Translated {
  RunConfig config;
  config::Provenance origins;
  std::string without_effect;
  std::vector<std::string> left_open;
};

Translated translated(const std::string& deepspeeds,
                      const std::string& run = "{}", int64_t world_size = 1) {
  Translated found;
  found.config = run_config_from_text(run, "run", {}, &found.origins);
  DeepSpeed deepspeed(deepspeeds, "ds");
  deepspeed.apply(found.config, found.origins);
  deepspeed.apply_batch(found.config, world_size, found.origins);
  found.config.data.train = {"text.txt"};
  complete(found.config, world_size);
  found.without_effect = deepspeed.without_effect();
  found.left_open = deepspeed.left_open(found.config);
  return found;
}

std::string refusal(const std::string& deepspeeds,
                    const std::string& run = "{}", int64_t world_size = 1) {
  try {
    translated(deepspeeds, run, world_size);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig) << error.what();
    return error.what_without_backtrace();
  }
  return "";
}

// The file A of the two that everybody starts from.
constexpr const char* kA = R"({
  "train_batch_size": 32,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "overlap_comm": true,
    "allgather_bucket_size": 2e8
  }
})";

TEST(DeepSpeed, FileAOnEveryWorld) {
  for (const int64_t world : {1, 2, 4, 8, 16, 32}) {
    const auto found = translated(kA, "{}", world);
    EXPECT_EQ(found.config.batch.micro, 32 / world);
    EXPECT_EQ(accumulation(found.config), 1);
    EXPECT_EQ(found.config.zero.stage, 2);
    EXPECT_EQ(found.config.mesh.dp_shard, world);
  }
  EXPECT_EQ(refusal(kA, "{}", 3),
            "batch: 32 = 3 x ? x ? has no solution: train_batch_size is 32 "
            "(ds:2:23: train_batch_size), the data-parallel degree is 3 (3 "
            "ranks), train_micro_batch_size_per_gpu is open, "
            "gradient_accumulation_steps is open. Nearest train_batch_size: 30 "
            "or 33; nearest data-parallel degree: 2 or 4.");
}

TEST(DeepSpeed, FileAsOptimizerIsDeepSpeeds) {
  const auto found = translated(kA, "{}", 2);
  const auto& optimizer = found.config.optimizer;
  EXPECT_EQ(optimizer.type, "adamw");
  EXPECT_EQ(optimizer.lr, 0.001);
  EXPECT_THAT(optimizer.betas, ElementsAre(0.9, 0.999));
  EXPECT_EQ(optimizer.eps, 1e-8);
  EXPECT_EQ(optimizer.weight_decay, 0.0);
  EXPECT_EQ(optimizer.clip_norm, 0.0);
  EXPECT_EQ(found.config.schedule.type, "constant");
  EXPECT_EQ(found.origins.at("zero.stage"), "ds:5:14: zero_optimization.stage");
  EXPECT_EQ(found.origins.at("optimizer.lr"), "ds:3:50: optimizer.params.lr");
  EXPECT_EQ(found.origins.at("batch.micro"),
            "ds: train_batch_size / (data-parallel degree 2)");
  EXPECT_EQ(found.origins.at("optimizer.clip_norm"),
            "ds: DeepSpeed's default of gradient_clipping");
  EXPECT_EQ(found.without_effect,
            "ds has keys without effect here: "
            "zero_optimization.allgather_bucket_size (parameters are gathered "
            "and freed by layer; zero.prefetch counts layers)");
  EXPECT_THAT(found.left_open,
              ElementsAre("DeepSpeed's defaults, where ds says nothing: "
                          "optimizer.weight_decay 0.0, optimizer.betas "
                          "[0.9,0.999], schedule.type \"constant\", "
                          "optimizer.clip_norm 0.0"));
}

constexpr const char* kB = R"({
  "train_batch_size": 64,
  "zero_optimization": {"stage": 2},
  "moe": {"enabled": true, "num_experts": 32, "k": 2,
          "expert_parallel_size": 8}
})";
constexpr const char* kMixtral = R"({"model": {"family": "mixtral"}})";

TEST(DeepSpeed, FileBOnEveryWorld) {
  for (const int64_t world : {8, 16, 32, 64}) {
    const auto found = translated(kB, kMixtral, world);
    const auto& config = found.config;
    const auto mesh = config.mesh.mesh(world, config.zero.stage);
    EXPECT_EQ(config.model.moe.experts / mesh.degree(mesh::Axis::kEp), 4);
    EXPECT_EQ(mesh.degree(mesh::Axis::kExpertDp), world / 8);
    EXPECT_EQ(config.model.moe.top_k, 2);
    EXPECT_EQ(config.batch.micro, 64 / world);
    EXPECT_EQ(accumulation(config), 1);
    EXPECT_THAT(found.left_open.at(0), HasSubstr("ds has no optimizer"));
    EXPECT_EQ(config.optimizer.weight_decay, 0.1) << "our default";
  }
  for (const int64_t world : {1, 2, 4, 12}) {
    EXPECT_THAT(refusal(kB, kMixtral, world), HasSubstr("mesh.ep is 8"))
        << world;
  }
  EXPECT_THAT(refusal(kB, kMixtral, 24),
              HasSubstr("64 = 24 x ? x ? has no solution"));
  EXPECT_THAT(refusal(kB, "{}", 8), HasSubstr("model.family llama is dense"));
}

struct Batch {
  const char* deepspeeds;
  const char* run;
  int64_t world, global, micro;
};

TEST(DeepSpeed, AnyTwoOfTheBatchGiveTheThird) {
  const std::vector<Batch> cases = {
      {R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})", "{}",
       2, 24, 3},
      {R"({"train_batch_size": 24, "gradient_accumulation_steps": 4})", "{}", 2,
       24, 3},
      {R"({"train_micro_batch_size_per_gpu": 3,
           "gradient_accumulation_steps": 4})",
       "{}", 2, 24, 3},
      {R"({"train_micro_batch_size_per_gpu": 3})", "{}", 2, 6, 3},
      {R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3,
           "gradient_accumulation_steps": 4})",
       "{}", 2, 24, 3},
      // Numbers of both files.
      {R"({"gradient_accumulation_steps": 4})", R"({"batch": {"global": 24}})",
       2, 24, 3},
      {R"({"gradient_accumulation_steps": 4})", R"({"batch": {"micro": 3}})", 2,
       24, 3},
      {R"({"train_batch_size": "auto", "gradient_accumulation_steps": "auto",
           "train_micro_batch_size_per_gpu": 3})",
       R"({"batch": {"global": 24}})", 2, 24, 3},
      {R"({"gradient_accumulation_steps": 4})", "{}", 2, 16, 2},
      {"{}", R"({"batch": {"global": 24}})", 2, 24, 12},
      // What ranks do not divide is the run's to share out.
      {R"({"train_batch_size": 8})", R"({"batch": {"uneven": true}})", 3, 8, 3},
      {R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2})",
       R"({"batch": {"uneven": true}})", 3, 10, 2},
      // Ranks of one replica are no further factor.
      {R"({"train_batch_size": 24})", R"({"mesh": {"tp": 2}})", 4, 24, 12}};
  for (const Batch& each : cases) {
    const auto found = translated(each.deepspeeds, each.run, each.world);
    EXPECT_EQ(found.config.batch.global, each.global) << each.deepspeeds;
    EXPECT_EQ(found.config.batch.micro, each.micro) << each.deepspeeds;
  }
}

TEST(DeepSpeed, ABatchThatDoesNotFitIsRefusedWithItsEquation) {
  EXPECT_EQ(
      refusal(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
                  "gradient_accumulation_steps": 2})",
              "{}", 2),
      "batch: 8 = 2 x 1 x 2 does not hold: train_batch_size is 8 (ds:1:22: "
      "train_batch_size), the data-parallel degree is 2 (2 ranks), "
      "train_micro_batch_size_per_gpu is 1 (ds:1:59: "
      "train_micro_batch_size_per_gpu), gradient_accumulation_steps is 2 "
      "(ds:2:50: gradient_accumulation_steps). Nearest train_batch_size: 4; "
      "nearest data-parallel degree: 4; or leave one of the three out.");
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": 5})",
                      R"({"batch": {"global": 24}, "mesh": {"tp": 2}})", 4),
              HasSubstr("24 = 2 x ? x 5 has no solution: train_batch_size is "
                        "24 (run:1:22), the data-parallel degree is 2 (4 "
                        "ranks, 2 to a replica), "));
  EXPECT_EQ(refusal(R"({"train_batch_size": 0})"),
            "ds:1:22: train_batch_size: batch.global is 0: it must be at least "
            "1.");
  EXPECT_EQ(refusal(R"({"train_micro_batch_size_per_gpu": 0})"),
            "ds:1:36: train_micro_batch_size_per_gpu is 0: it must be at least "
            "1.");
  EXPECT_THAT(refusal(kA, R"({"mesh": {"dp": 2}})", 4), HasSubstr("mesh"));
}

// For a mesh that is searched: what is said, and what the run has then.
std::string of_search(const std::string& deepspeeds, const std::string& run,
                      int64_t global, int64_t micro) {
  config::Provenance origins;
  auto config = run_config_from_text(run, "run", {}, &origins);
  DeepSpeed deepspeed(deepspeeds, "ds");
  deepspeed.apply(config, origins);
  const std::string said = deepspeed.check_searched_batch(config, origins);
  EXPECT_EQ(config.batch.global, global) << deepspeeds;
  EXPECT_EQ(config.batch.micro, micro) << deepspeeds;
  EXPECT_EQ(config::is_set(origins, "batch.micro"), micro > 0) << deepspeeds;
  return said;
}

TEST(DeepSpeed, NothingFollowsOfTheBatchOfASearch) {
  const int64_t usual = RunConfig().batch.global;
  EXPECT_EQ(of_search(R"({"train_batch_size": 7})", "{}", 7, 0), "");
  EXPECT_EQ(of_search(R"({"train_batch_size": 24,
                          "train_micro_batch_size_per_gpu": 5})",
                      "{}", 24, 5),
            "");
  EXPECT_EQ(of_search("{}", R"({"batch": {"micro": 3}})", usual, 3), "");
  EXPECT_EQ(of_search(R"({"train_micro_batch_size_per_gpu": "auto"})",
                      R"({"batch": {"micro": 3}})", usual, 3),
            "");
  const std::string idle =
      "ds:1:33: gradient_accumulation_steps is 5, without effect on a search: "
      "what a rank accumulates follows from batch.global and from the layout";
  const std::string steps = R"({"gradient_accumulation_steps": 5})";
  EXPECT_EQ(of_search(steps, "{}", usual, 0), idle);
  EXPECT_EQ(of_search(steps, R"({"batch": {"global": 24, "micro": 2}})", 24, 2),
            idle);
  const auto refused = [](const std::string& deepspeeds,
                          const std::string& run) -> std::string {
    try {
      of_search(deepspeeds, run, 0, 0);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_EQ(
      refused(R"({"train_micro_batch_size_per_gpu": 3})", "{}"),
      "batch: train_batch_size is open, and would follow from the "
      "data-parallel degree, which is searched: train_micro_batch_size_per_gpu "
      "is 3 (ds:1:36: train_micro_batch_size_per_gpu). Give train_batch_size, "
      "or batch.global.");
  EXPECT_THAT(refused(steps, R"({"batch": {"micro": 3}})"),
              HasSubstr("_per_gpu is 3 (run:1:21). Give train_batch_size"));
  EXPECT_THAT(refused(R"({"gradient_accumulation_steps": 0})", "{}"),
              HasSubstr("it must be at least 1"));
}

TEST(DeepSpeed, Optimizers) {
  const auto optimizer = [](const std::string& type,
                            const std::string& params) {
    return translated(R"({"optimizer": {"type": ")" + type +
                      R"(", "params": {)" + params + "}}}")
        .config.optimizer;
  };
  EXPECT_EQ(optimizer("Adam", "").type, "adamw");
  EXPECT_EQ(optimizer("adam", R"("adam_w_mode": true)").type, "adamw");
  EXPECT_EQ(optimizer("Adam", R"("adam_w_mode": false)").type, "adam");
  EXPECT_EQ(optimizer("AdamW", "").lr, 1e-3);
  EXPECT_EQ(optimizer("AdamW", R"("torch_adam": true)").weight_decay, 0.01);
  EXPECT_EQ(optimizer("AdamW", R"("eps": 1e-6)").eps, 1e-6);
  const auto lion = optimizer("Lion", R"("lr": 1e-4, "weight_decay": 1)");
  EXPECT_EQ(lion.type, "lion");
  EXPECT_THAT(lion.betas, ElementsAre(0.9, 0.99));
  EXPECT_EQ(lion.weight_decay, 1.0);
  const auto sgd = optimizer("SGD", R"("lr": 0.1, "momentum": 0.9)");
  EXPECT_EQ(sgd.type, "sgd");
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_EQ(sgd.weight_decay, 0.0);
  const auto muon = optimizer(
      "Muon",
      R"("lr": 0.1, "muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9)");
  EXPECT_EQ(muon.type, "muon");
  EXPECT_EQ(muon.lr, 0.02);
  EXPECT_EQ(muon.muon.momentum, 0.9);
  EXPECT_EQ(muon.muon.adamw_lr, 1e-3);
  EXPECT_EQ(muon.momentum, 0.0);
  EXPECT_EQ(muon.eps, 1e-10);
}

// Each of the two groups takes its own rate, else lr, else its own default.
TEST(DeepSpeed, RatesOfMuon) {
  struct Rates {
    std::string params;
    double muon, adamw;
    std::string scheduler = "";
  };
  const std::string warmup =
      R"(, "scheduler": {"type": "WarmupLR", "params": )";
  for (const Rates& each : {
           Rates{"", 0.02, 3e-4},
           Rates{R"("lr": 0.5)", 0.5, 0.5},
           Rates{R"("lr": 0.5, "muon_lr": 0.25)", 0.25, 0.5},
           Rates{R"("muon_lr": 0.25)", 0.25, 3e-4},
           Rates{R"("adam_lr": 0.125)", 0.02, 0.125},
           Rates{R"("lr": 0.5, "adam_lr": 0.125)", 0.5, 0.125, warmup + "{}}"},
           Rates{R"("lr": 0.5, "adam_lr": 0.125)", 0.25, 0.25,
                 warmup + R"({"warmup_max_lr": 0.25}})"},
           Rates{R"("lr": 0.5)", 0.5, 0.5,
                 warmup + R"({"warmup_min_lr": 0.125}})"},
       }) {
    const auto found =
        translated(R"({"optimizer": {"type": "Muon", "params": {)" +
                   each.params + "}}" + each.scheduler + "}")
            .config.optimizer;
    EXPECT_EQ(found.lr, each.muon) << each.params;
    const double adamw =
        found.muon.adamw_lr > 0 ? found.muon.adamw_lr : found.lr;
    EXPECT_EQ(adamw, each.adamw) << each.params;
  }
}

TEST(DeepSpeed, Schedulers) {
  const auto run = R"({"optimizer": {"lr": 0.5}, "run": {"steps": 20}})";
  const auto warmup = translated(
      R"({"optimizer": {"type": "Adam", "params": {"lr": 0.25}},
          "scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": 0.125, "warmup_max_lr": 0.5}}})",
      run);
  EXPECT_EQ(warmup.config.schedule.type, "constant");
  EXPECT_EQ(warmup.config.schedule.convention, "deepspeed");
  EXPECT_EQ(warmup.config.schedule.warmup, 1000);
  EXPECT_EQ(warmup.config.schedule.warmup_type, "log");
  EXPECT_EQ(warmup.config.schedule.start_lr, 0.125);
  EXPECT_EQ(warmup.config.optimizer.lr, 0.5);
  EXPECT_THAT(warmup.without_effect,
              HasSubstr("optimizer.params.lr (WarmupLR goes to "
                        "scheduler.params.warmup_max_lr, 0.5)"));
  const auto decay = translated(
      R"({"scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 1e-5, "warmup_num_steps": 5,
            "warmup_type": "linear", "total_num_steps": 15}}})");
  EXPECT_EQ(decay.config.schedule.type, "linear");
  EXPECT_EQ(decay.config.schedule.steps, 15);
  EXPECT_EQ(decay.config.schedule.start_lr, 1e-5);
  EXPECT_EQ(decay.config.schedule.min_lr, 1e-5);
  EXPECT_EQ(decay.config.optimizer.lr, 1e-3);
  const auto cosine = translated(
      R"({"scheduler": {"type": "WarmupCosineLR", "params": {
            "warmup_min_ratio": 0.25, "warmup_num_steps": 5,
            "total_num_steps": "auto"}}})",
      run);
  EXPECT_EQ(cosine.config.schedule.type, "cosine");
  EXPECT_EQ(cosine.config.schedule.steps, 0);
  EXPECT_EQ(cosine.config.schedule.start_lr, 0.125);
  EXPECT_DOUBLE_EQ(cosine.config.schedule.min_lr, 0.5 * 1e-4);
  EXPECT_EQ(cosine.config.optimizer.lr, 0.5);
  // All that Hugging Face writes "auto" for is the run's.
  const auto open = translated(
      R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto",
            "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
          "scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto"}},
          "gradient_clipping": "auto", "fp16": {"enabled": "auto"},
          "bf16": {"enabled": "auto"}})",
      R"({"optimizer": {"lr": 0.5, "clip_norm": 2}, "schedule": {"warmup": 7},
          "precision": {"compute": "bf16"}})");
  EXPECT_EQ(open.config.optimizer.lr, 0.5);
  EXPECT_EQ(open.config.optimizer.clip_norm, 2.0);
  EXPECT_EQ(open.config.optimizer.weight_decay, 0.1);
  EXPECT_EQ(open.config.schedule.warmup, 7);
  EXPECT_EQ(open.config.precision.compute, "bf16");
}

TEST(DeepSpeed, Fp16WithItsLossScale) {
  const auto precision = [](const char* fp16, const char* run = "{}") {
    return translated(R"({"fp16": )" + std::string(fp16) + "}", run)
        .config.precision;
  };
  const auto open = precision(R"({"enabled": true})");
  EXPECT_EQ(open.compute, "fp16");
  EXPECT_EQ(open.loss_scale, 0.0);
  EXPECT_EQ(open.initial_loss_scale, 65536.0);
  EXPECT_EQ(open.scale_growth_interval, 1000);
  EXPECT_EQ(open.scale_hysteresis, 2);
  EXPECT_FALSE(open.consecutive_hysteresis);
  EXPECT_EQ(open.min_loss_scale, 1.0);
  const char* const all =
      R"({"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12,
          "loss_scale_window": 7, "hysteresis": 3,
          "consecutive_hysteresis": true, "min_loss_scale": 0.25,
          "auto_cast": false, "fp16_master_weights_and_grads": false})";
  const auto given = precision(all, R"({"precision": {"compute": "fp16"}})");
  EXPECT_EQ(given.initial_loss_scale, 4096.0);
  EXPECT_EQ(given.scale_growth_interval, 7);
  EXPECT_EQ(given.scale_hysteresis, 3);
  EXPECT_TRUE(given.consecutive_hysteresis);
  EXPECT_EQ(given.min_loss_scale, 0.25);
  // The run is not in fp16.
  EXPECT_EQ(precision(all).initial_loss_scale, 65536.0);
  // What finds a scale says nothing of one that is given.
  const auto fixed = translated(R"({"fp16": {"enabled": true,
                                             "loss_scale": 128}})",
                                R"({})")
                         .config;
  EXPECT_EQ(fixed.precision.loss_scale, 128.0);
  const parallel::PrecisionConfig unsaid;
  EXPECT_EQ(fixed.precision.scale_growth_interval,
            unsaid.scale_growth_interval);
  EXPECT_EQ(fixed.precision.scale_hysteresis, unsaid.scale_hysteresis);
  EXPECT_EQ(translated(R"({"communication_data_type": "fp16"})")
                .config.precision.reduce,
            "fp16");
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": false}})",
                      R"({"precision": {"compute": "fp16"}})"),
              HasSubstr("precision.compute is fp16 (run:1:27), but false by "
                        "ds:1:22: fp16.enabled"));
}

TEST(DeepSpeed, SizesAreInElements) {
  const auto bucket = [](const char* more) {
    return translated(R"({"zero_optimization": {"reduce_bucket_size": 2e8})" +
                      std::string(more) + "}")
        .config.zero;
  };
  EXPECT_EQ(bucket("").bucket_bytes(), 800'000'000);
  EXPECT_EQ(bucket(R"(, "bf16": {"enabled": true})").bucket_bytes(),
            800'000'000);
  EXPECT_EQ(bucket(R"(, "bf16": {"enabled": true},
                      "data_types": {"grad_accum_dtype": "bf16"})")
                .bucket_bytes(),
            400'000'000);
}

TEST(DeepSpeed, WhatElseBecomesKeysOfTheRun) {
  const auto found = translated(
      R"({"steps_per_print": 7, "gradient_clipping": 0.5,
          "tensorboard": {"enabled": true, "output_path": "x"},
          "activation_checkpointing": {"partition_activations": false,
                                       "number_checkpoints": 3},
          "tensor_parallel": {"autotp_size": 2},
          "zero_optimization": {"stage": 3, "mics_shard_size": 2}})",
      "{}", 8);
  EXPECT_EQ(found.config.monitor.every, 7);
  EXPECT_EQ(found.config.optimizer.clip_norm, 0.5);
  EXPECT_TRUE(found.config.monitor.tensorboard);
  EXPECT_EQ(found.config.recompute.mode, "block");
  EXPECT_EQ(found.config.mesh.tp, 2);
  EXPECT_EQ(found.config.mesh.dp_shard, 2);
  EXPECT_EQ(found.config.mesh.dp_replicate, 2);
  // How it is recomputed is the run's.
  EXPECT_EQ(translated(R"({"activation_checkpointing":
                            {"cpu_checkpointing": true}})",
                       R"({"recompute": {"mode": "none"}})")
                .config.recompute.mode,
            "none");
}

TEST(DeepSpeed, WhatBothSayMustAgree) {
  EXPECT_EQ(
      refusal(R"({"train_batch_size": 32})", R"({"batch": {"global": 16}})"),
      "batch.global is 16 (run:1:22), but 32 by ds:1:22: "
      "train_batch_size. Leave it out of one of the two, or give both "
      "the same; \"auto\" in DeepSpeed's file takes the run's.");
  EXPECT_EQ(
      refusal(R"({"train_batch_size": 32})", R"({"batch": {"global": 32}})"),
      "");
  EXPECT_THAT(refusal(R"({"bf16": {"enabled": false}})",
                      R"({"precision": {"compute": "bf16"}})"),
              HasSubstr("precision.compute is bf16 (run:1:27), but false by "
                        "ds:1:22: bf16.enabled"));
  EXPECT_THAT(refusal(R"({"moe": {"enabled": true, "expert_parallel_size": 2},
                          "expert_parallel": {"enabled": true,
                                              "autoep_size": 4}})"),
              HasSubstr("mesh.ep is 2 (ds:1:51: moe.expert_parallel_size), but "
                        "4 by ds:"));
  // DeepSpeed's defaults give way.
  EXPECT_EQ(translated(kA, R"({"optimizer": {"clip_norm": 3}})")
                .config.optimizer.clip_norm,
            3.0);
  // 0.1 x 1e-3 is not the double next to 1e-4, and means it.
  EXPECT_EQ(refusal(R"({"scheduler": {"type": "WarmupCosineLR", "params": {
                         "cos_min_ratio": 0.1, "warmup_num_steps": 5,
                         "total_num_steps": 9}}})",
                    R"({"optimizer": {"lr": 3e-3},
                        "schedule": {"min_lr": 3e-4}})"),
            "");
}

struct Refused {
  const char* deepspeeds;
  const char* message;
};

class RefusedByDeepSpeed : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedByDeepSpeed, NamesPlaceAndWayOut) {
  EXPECT_THAT(refusal(GetParam().deepspeeds), StartsWith(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Table, RefusedByDeepSpeed,
    ::testing::Values(
        Refused{R"({"train_batchsize": 3})",
                "ds:1:2: unknown key \"train_batchsize\". Did you mean "
                "\"train_batch_size\"?"},
        Refused{"{\n \"zero_optimization\": {\n  \"stge\": 3}}",
                "ds:3:3: unknown key \"zero_optimization.stge\". Did you mean "
                "\"zero_optimization.stage\"?"},
        Refused{R"({"stage": 3})",
                "ds:1:2: unknown key \"stage\". Did you mean "
                "\"zero_optimization.stage\"?"},
        Refused{R"({"zero_optimization.stage": 3})",
                "ds:1:2: unknown key \"zero_optimization.stage\"."},
        Refused{R"({"wandb": {"enabled": true, "groups": "x"}})",
                "ds:1:29: unknown key \"wandb.groups\". Did you mean "
                "\"wandb.group\"?"},
        Refused{R"({"nothing_like_it": 1})",
                "ds:1:2: unknown key \"nothing_like_it\". 'tessera schema "
                "--deepspeed' lists those that are known."},
        Refused{R"({"train_batch_size": 3, "train_batch_size": 3})",
                "ds:1:25: duplicate key \"train_batch_size\""},
        Refused{R"({"train_batch_size": 2.5})",
                "ds:1:22: train_batch_size: expected a whole number of 64 "
                "bits, or \"auto\", got 2.5."},
        Refused{R"({"gradient_accumulation_steps": 4611686018427387904})",
                "ds:1:33: gradient_accumulation_steps is 4611686018427387904: "
                "it must be at most 1000000000."},
        Refused{R"({"zero_optimization": true})",
                "ds:1:23: zero_optimization: expected an object, got true."},
        Refused{R"({"zero_optimization": {"overlap_comm": "yes"}})",
                "ds:1:40: zero_optimization.overlap_comm: expected true or "
                "false, or \"auto\", got \"yes\"."},
        Refused{R"({"zero_optimization": {"stage": 4}})",
                "ds:1:33: zero_optimization.stage: zero.stage is 4: it must be "
                "at most 3."},
        Refused{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
                "ds:1:49: bf16.enabled and ds:1:22: fp16.enabled are both "
                "true, but a run computes in one type. Set one of them to "
                "false, or leave its section out."},
        Refused{R"({"fp16": {"enabled": true, "loss_scale": -3}})",
                "ds:1:42: fp16.loss_scale: precision.loss_scale is -3"},
        Refused{R"({"fp16": {"enabled": true, "initial_scale_power": 200}})",
                "ds:1:51: fp16.initial_scale_power: "
                "precision.initial_loss_scale is "},
        Refused{R"({"fp16": {"enabled": true,
                    "fp16_master_weights_and_grads": true}})",
                "ds:2:54: fp16.fp16_master_weights_and_grads is true, not "
                "false: masters and moments are fp32"},
        Refused{R"({"optimizer": {"type": "OneBitAdam"}})",
                "ds:1:24: optimizer.type is \"OneBitAdam\", which is none of "
                "Adam, AdamW, SGD, Lion, Muon"},
        Refused{R"({"optimizer": {"type": "SGD", "params": {"muon_lr": 1}}})",
                "ds:1:53: optimizer.params.muon_lr is of Muon. Use "
                "optimizer.params.lr."},
        Refused{R"({"optimizer": {"params": {"lr": 1}}})",
                "ds: optimizer has no type. Add optimizer.type: one of Adam"},
        Refused{R"({"scheduler": {"type": "OneCycle"}})",
                "ds:1:24: scheduler.type is \"OneCycle\", which is none of "
                "WarmupLR, WarmupDecayLR, WarmupCosineLR: cycles"},
        Refused{R"({"scheduler": {"type": "WarmupDecayLR"}})",
                "ds:1:24: scheduler.type (WarmupDecayLR) needs "
                "scheduler.params.total_num_steps"},
        Refused{R"({"scheduler": {"type": "WarmupLR",
                    "params": {"cos_min_ratio": 0.1}}})",
                "ds:2:49: scheduler.params.cos_min_ratio is no parameter of "
                "WarmupLR."},
        Refused{R"({"zero_optimization": {"offload_param":
                    {"device": "tape"}}})",
                "ds:2:32: zero_optimization.offload_param.device is \"tape\", "
                "which is none of none, cpu, nvme: it is not built."},
        Refused{R"({"zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                    "offload_param": {"device": "nvme", "nvme_path": "/b"}}})",
                "ds:3:70: zero_optimization.offload_param.nvme_path is \"/b\", "
                "and ds:2:74: zero_optimization.offload_optimizer.nvme_path "
                "\"/a\": a rank has one file. Give both the same."},
        Refused{R"({"zero_optimization": {"zero_quantized_weights": true}})",
                "ds:1:50: zero_optimization.zero_quantized_weights is true, "
                "not false: gathers and reductions are not quantized"},
        Refused{R"({"elasticity": {"enabled": true}})",
                "ds:1:16: elasticity is enabled: a batch that follows the "
                "world"},
        Refused{R"({"communication_data_type": "int8"})",
                "ds:1:29: communication_data_type is \"int8\", which is none "
                "of fp32, bf16, bfp16, fp16"},
        Refused{"[]", "ds:1:1: expected an object"},
        Refused{R"({"train_batch_size": 1,})", "ds:1:24: syntax error"}));

TEST(DeepSpeed, WhatIsSoAnywayIsNotWarnedOf) {
  EXPECT_THAT(
      translated(
          R"({"fp16": {"enabled": false, "loss_scale": 0, "hysteresis": 2},
              "wall_clock_breakdown": false, "prescale_gradients": false,
              "amp": {"enabled": false, "opt_level": "O1"},
              "wandb": {"enabled": false}, "elasticity": {"enabled": false},
              "zero_optimization": {"overlap_comm": true,
                "contiguous_gradients": true, "reduce_bucket_size": "auto",
                "offload_optimizer": {"device": "none"},
                "offload_param": null},
              "moe": {"enabled": false, "num_experts": 4}})")
          .without_effect,
      IsEmpty());
}

TEST(DeepSpeed, WhatHasNoEffectIsNamedOnceWithItsReason) {
  EXPECT_EQ(
      translated(
          R"({"zero_optimization": {"overlap_comm": false,
                "offload_optimizer": {"device": "cpu", "pin_memory": true}},
              "wall_clock_breakdown": true, "wandb": {"enabled": true},
              "moe": {"num_experts": 4}})")
          .without_effect,
      "ds has keys without effect here: moe.num_experts (moe.enabled is not "
      "true); zero_optimization.overlap_comm (communication runs behind "
      "computation wherever it can); "
      "zero_optimization.offload_optimizer.pin_memory (what goes to a "
      "device and back is pinned, and on the CPU nothing goes); "
      "wall_clock_breakdown, "
      "wandb (metrics.jsonl, summary.json and monitor.trace have it always); "
      "zero_optimization.offload_optimizer.device (the CPU's memory holds all "
      "states of its ranks, and those of GPUs go to files alone, as nvme "
      "says)");
}

TEST(DeepSpeed, StatesGoToFilesWhereTheyGoToNvme) {
  const auto zero_of = [](const char* optimizer, const char* param) {
    return translated(c10::str(R"({"zero_optimization": {"stage": 3,
        "offload_optimizer": )",
                               optimizer, R"(, "offload_param": )", param,
                               "}}"))
        .config.zero;
  };
  const auto states =
      zero_of(R"({"device": "nvme", "nvme_path": "/disk"})", "null");
  EXPECT_EQ(states.offload, "optimizer");
  EXPECT_EQ(states.offload_folder, "/disk");
  const auto both = translated(R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "cpu"},
      "offload_param": {"device": "NVMe"}}})");
  EXPECT_EQ(both.config.zero.offload, "all");
  EXPECT_THAT(both.without_effect,
              HasSubstr("zero_optimization.offload_optimizer.device (states go "
                        "along with parameters, to files)"));
  EXPECT_THAT(
      translated(R"({"zero_optimization": {"stage": 3,
          "offload_optimizer": {"device": "none"},
          "offload_param": {"device": "nvme"}}})")
          .without_effect,
      HasSubstr("zero_optimization.offload_optimizer.device (states go"));
  EXPECT_EQ(zero_of(R"({"device": "cpu"})", R"({"device": "none"})").offload,
            "none");
}

// What a run writes down is what it was, without DeepSpeed's file.
TEST(DeepSpeed, TheResolvedConfigurationIsEnough) {
  const auto found = translated(kB, kMixtral, 16);
  RunConfig again = run_config_from_text(to_json(found.config), "config.json");
  complete(again, 16);
  EXPECT_EQ(to_json(again), to_json(found.config));
}

TEST(DeepSpeed, EveryKeyBecomesOneThatThereIs) {
  const RunConfig config;
  RunConfig copy = config;
  config::Section root;
  copy.declare(root);
  std::vector<std::string> names;
  for (const auto& entry : config::entries(root)) names.push_back(entry.name);
  for (const auto& key : detail::deepspeed_keys()) {
    EXPECT_EQ(detail::deepspeed_key(key.name), &key) << key.name << " twice";
    if (key.effect != detail::DeepSpeedEffect::kBecomes) continue;
    EXPECT_THAT(names, ::testing::Contains(std::string(key.to))) << key.name;
  }
}

}  // namespace
}  // namespace tessera::engine
