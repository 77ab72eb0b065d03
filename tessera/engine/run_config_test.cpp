#include "tessera/engine/run_config.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/random.h"
#include "tessera/engine/run_devices.h"

namespace tessera::engine {
namespace {

using tessera::detail::Json;

RunConfig read(const std::string& text, config::Provenance* origins = nullptr) {
  return run_config_from_text(text, "f", {}, origins);
}

std::string refusal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig) << error.what();
    return error.what_without_backtrace();
  }
  return "";
}

std::string refusal(const std::string& text) {
  return refusal_of([&] { read(text); });
}

// With something to train on.
RunConfig minimal() {
  RunConfig config;
  config.data.train = {"text.txt"};
  return config;
}

std::string completed(RunConfig config, int64_t world_size) {
  return refusal_of([&] { complete(config, world_size); });
}

Json schema_properties() {
  RunConfig config;
  config::Section root;
  config.declare(root);
  return tessera::detail::parse_json(config::schema(root), "schema")
      .at("properties");
}

// The keys of the contract, so that none is lost or renamed in passing.
TEST(RunConfig, HasTheKeysOfTheContract) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> contract =
      {{"run", {"name", "dir", "seed", "steps", "device", "threads"}},
       {"model",
        {"from",
         "load_weights",
         "family",
         "layers",
         "hidden",
         "heads",
         "kv_heads",
         "head_dim",
         "query_pre_attn_scalar",
         "ffn",
         "vocab",
         "max_seq",
         "tie_embeddings",
         "norm_eps",
         "rope_theta",
         "rope_theta_local",
         "rope_scaling",
         "window",
         "window_every",
         "window_first_full",
         "latent",
         "dropout",
         "moe",
         "mtp",
         "lora"}},
       {"data",
        {"train", "valid", "weights", "valid_share", "exclude", "format",
         "field", "chat_template", "pair", "loss_on", "packing",
         "intra_document_masking", "skip", "tokenizer", "seq_len", "shuffle",
         "reader"}},
       {"batch", {"global", "micro", "uneven"}},
       {"mesh",
        {"pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp",
         "order", "data_parallel", "speeds", "measure_speeds"}},
       {"zero",
        {"stage", "expert_stage", "expert_shard", "reshard_after_forward",
         "bucket_mb", "prefetch", "offload", "offload_folder"}},
       {"tensor", {"sequence_parallel"}},
       {"context", {"method"}},
       {"expert", {"dispatch_chunks"}},
       {"pipeline", {"schedule", "chunks", "split", "cut", "order"}},
       {"precision",
        {"compute", "products", "reduce", "loss_scale", "initial_loss_scale",
         "scale_growth_interval", "scale_hysteresis", "consecutive_hysteresis",
         "min_loss_scale"}},
       {"recompute", {"mode", "every"}},
       {"optimizer",
        {"type", "lr", "betas", "eps", "momentum", "weight_decay", "clip_norm",
         "normalize_grad", "skip_nonfinite", "state_dtype", "ema", "muon",
         "groups"}},
       {"schedule",
        {"type", "warmup", "warmup_type", "start_lr", "min_lr", "steps",
         "decay", "convention"}},
       {"validate", {"every", "samples", "at_start", "patience", "ema"}},
       {"spike",
        {"action", "window", "deviations", "skip_before", "skip_after",
         "max_rewinds"}},
       {"comm", {"backend", "algorithm", "timeout_s", "silence_s"}},
       {"checkpoint",
        {"every", "keep", "keep_best", "async", "dir", "local_every",
         "local_dir"}},
       {"monitor",
        {"every", "losses_late", "tensorboard", "by_rank", "trace", "replicas",
         "reruns", "sample", "sample_prompt", "sample_tokens",
         "sample_temperature"}}};
  std::vector<std::pair<std::string, std::vector<std::string>>> found;
  const Json sections = schema_properties();
  for (const auto& [name, section] : sections.items()) {
    if (name == "$schema") continue;
    found.emplace_back(name, std::vector<std::string>{});
    for (const auto& [key, ignored] : section["properties"].items()) {
      found.back().second.push_back(key);
    }
  }
  EXPECT_EQ(found, contract);
}

TEST(RunConfig, DefaultsPassTheirOwnChecksAndReadBack) {
  const RunConfig config = read("{}");
  const std::string text = to_json(config);
  EXPECT_EQ(to_json(read(text)), text);
  EXPECT_EQ(completed(minimal(), 1), "");
  EXPECT_EQ(completed(minimal(), 2), "");
  EXPECT_EQ(completed(minimal(), 4), "");
}

TEST(RunConfig, ACompletedOneReadsBackAndCompletesToItself) {
  RunConfig config = minimal();
  complete(config, 2);
  RunConfig again = read(to_json(config));
  complete(again, 2);
  EXPECT_EQ(to_json(again), to_json(config));
}

// Every key with values of every wrong kind: refused with its name and place,
// or taken and written back the same.
TEST(RunConfig, NoValueOfAnyKeyCrashesOrIsConverted) {
  const std::vector<std::string> values = {"null",
                                           "true",
                                           "-1",
                                           "0",
                                           "1",
                                           "2.5",
                                           "-0.5",
                                           "1e308",
                                           "5e-324",
                                           "9223372036854775807",
                                           "9223372036854775808",
                                           "-9223372036854775808",
                                           "18446744073709551616",
                                           "\"\"",
                                           "\"zzz\"",
                                           "\"a\\u0000b\"",
                                           "[]",
                                           "[1]",
                                           "[null]",
                                           "[\"\"]",
                                           "[[]]",
                                           "{}",
                                           "{\"a\": 1}"};
  size_t refused = 0, taken = 0;
  const std::function<void(const Json&, const std::string&, const std::string&,
                           const std::string&)>
      try_all = [&](const Json& properties, const std::string& dotted,
                    const std::string& before, const std::string& after) {
        for (const auto& [name, schema] : properties.items()) {
          const std::string key = dotted + name;
          const std::string open = before + "{\"" + name + "\":\n";
          if (schema.contains("properties")) {
            try_all(schema["properties"], key + ".", open, "}" + after);
            continue;
          }
          for (const auto& value : values) {
            const std::string text = open + value + "}" + after;
            const auto lines =
                std::to_string(1 + std::count(open.begin(), open.end(), '\n'));
            std::string message = refusal(text);
            if (message.empty()) {
              const std::string written = to_json(read(text));
              EXPECT_EQ(to_json(read(written)), written) << text;
              ++taken;
            } else {
              // Of a list of objects an object may be what is wrong.
              const bool of_objects = schema.contains("items") &&
                                      schema["items"].contains("properties") &&
                                      value != "null";
              const std::string place = "f:" + lines + ":";
              EXPECT_TRUE(of_objects ? message.starts_with(place) &&
                                           message.find(key) < 40
                                     : message.starts_with(place + "1: " + key))
                  << text << "\n"
                  << message;
              EXPECT_LT(message.size(), 400);
              ++refused;
            }
          }
        }
      };
  Json sections = schema_properties();
  sections.erase("$schema");
  try_all(sections, "", "", "");
  EXPECT_GT(refused, 1000);
  EXPECT_GT(taken, 100);
}

// Flipped, removed and doubled bytes: read or refused with a place.
TEST(RunConfig, DamagedTextIsReadOrRefused) {
  const std::string whole = to_json(RunConfig{});
  const random::Stream stream(1, "damage");
  size_t refused = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    std::string text = whole;
    const size_t at = stream.below(4 * i, text.size());
    const size_t length = 1 + stream.below(4 * i + 1, 8);
    const auto letter = static_cast<char>(stream.below(4 * i + 2, 256));
    switch (stream.below(4 * i + 3, 4)) {
      case 0:
        text[at] = letter;
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, text.substr(at, length));
        break;
      default:
        text.resize(at);
    }
    const std::string message = refusal(text);
    if (message.empty()) continue;
    EXPECT_TRUE(message.starts_with("f:")) << message;
    ++refused;
  }
  EXPECT_GT(refused, 2000);
}

// By each of mesh.cp and mesh.tp it can be cut, and by both together not.
TEST(RunConfig, SequenceParallelismCutsWhatIsLeftOfCp) {
  RunConfig config = minimal();
  config.model.heads = 8;
  config.mesh.cp = 2;
  config.mesh.tp = 8;
  config.data.seq_len = config.model.max_seq = 2040;
  EXPECT_EQ(completed(config, 16), "");
  config.tensor.sequence_parallel = true;
  EXPECT_EQ(completed(config, 16),
            "mesh.cp (2) x mesh.tp (8) does not divide data.seq_len (2040), "
            "which tensor.sequence_parallel cuts. Nearest data.seq_len: 2032 "
            "or 2048; nearest mesh.tp: 4.");
  config.data.seq_len = 2032;
  EXPECT_EQ(completed(config, 16), "");
}

TEST(RunConfig, GradientsAreReducedInFp64WhereTheyAreComputedInIt) {
  RunConfig config = minimal();
  config.precision = {.compute = "fp64", .reduce = "fp64"};
  EXPECT_EQ(completed(config, 1), "");
  config.precision = {.compute = "fp32", .reduce = "fp64"};
  EXPECT_EQ(completed(config, 1),
            "precision.reduce is fp64 and precision.compute fp32, whose "
            "gradients are kept in fp32 at most. Use auto.");
}

TEST(RunConfig, WhatLiesInFilesIsNotCopiedForCheckpoints) {
  RunConfig config = minimal();
  config.checkpoint.async = true;
  EXPECT_EQ(completed(config, 1), "");
  config.zero.offload = "optimizer";
  EXPECT_EQ(completed(config, 1),
            "checkpoint.async is true, which copies what is saved into memory, "
            "but zero.offload is optimizer, by which it lies in files. Use "
            "checkpoint.async false, or zero.offload none.");
}

TEST(RunConfig, EachStageMayHaveADeviceOfItsOwn) {
  RunConfig config = minimal();
  config.mesh.pp = 2;
  config.run.device = "cpu,cpu";
  complete(config, 2);
  EXPECT_EQ(config.run.device_types,
            std::vector<c10::DeviceType>({at::kCPU, at::kCPU}));
  config.run.device_types = {at::kCUDA, at::kCPU};
  EXPECT_EQ(device_of_rank(config, 0), at::kCUDA);
  EXPECT_EQ(device_of_rank(config, 1), at::kCPU);
  EXPECT_FALSE(config.run.is_on_cpu());
  config.run.device = "cpu,cpu,cpu";
  EXPECT_EQ(refusal_of([&] { complete(config, 2); }),
            "run.device is cpu,cpu,cpu, for 3 stages, but mesh.pp is 2. Give "
            "one for all ranks, or one for each stage.");
}

TEST(RunConfig, AGpuIsTakenWhereItIsAndAutoTakesIt) {
  RunConfig config = minimal();
  complete(config, 1);
  EXPECT_EQ(config.run.is_on_cpu(), !at::hasCUDA());
  config.run.device = "cuda";
  if (at::hasCUDA()) {
    complete(config, 1);
    EXPECT_EQ(config.run.device_of_stage(0), at::kCUDA);
    return;
  }
  try {
    complete(config, 1);
    ADD_FAILURE() << "cuda was taken";
  } catch (const Error& error) {
    const std::string said = error.what_without_backtrace();
    EXPECT_TRUE(said.starts_with("run.device is cuda, but ")) << said;
    EXPECT_TRUE(said.ends_with("set run.device to cpu.")) << said;
  }
}

TEST(RunConfig, AGpuIsRefusedWhereItsPartIsNotBuilt) {
  const auto refused = [](const auto& set) {
    RunConfig config = minimal();
    set(config);
    complete(config, 1);
    config.run.device_types = {at::kCUDA};
    return refusal_of([&] { check_device(config); });
  };
  EXPECT_EQ(refused([](RunConfig&) {}), "");
  EXPECT_EQ(refused([](RunConfig& config) {
              config.model.dropout = 0.5;
              config.zero.offload = "optimizer";
            }),
            "");
  EXPECT_EQ(refused([](RunConfig& config) {
              config.zero = {.stage = 3, .offload = "all"};
            }),
            "");
  EXPECT_EQ(refused([](RunConfig& config) { config.zero.offload = "all"; }),
            "zero.offload is all with zero.stage 0, which no GPU is built for. "
            "Use 3 there, with which weights are brought to a GPU for each "
            "use, or zero.offload optimizer or none, or run.device cpu.");
  EXPECT_EQ(refused([](RunConfig& config) {
              config.model.family = "mixtral";
              config.model.moe.experts = 4;
              config.zero = {.stage = 3, .expert_stage = 1, .offload = "all"};
            }),
            "zero.offload is all with zero.expert_stage 1, which no GPU is "
            "built for. Use 3 there, with which weights are brought to a GPU "
            "for each use, or zero.offload optimizer or none, or run.device "
            "cpu.");
}

TEST(RunConfig, TheLossIsScaledWithFp16UnlessTheUserSays) {
  for (const auto& [compute, given, is] : {std::tuple{"fp16", -1.0, 0.0},
                                           {"bf16", -1.0, 1.0},
                                           {"fp32", -1.0, 1.0},
                                           {"fp16", 1.0, 1.0},
                                           {"fp16", 1024.0, 1024.0},
                                           {"fp32", 0.0, 0.0}}) {
    RunConfig config = minimal();
    config.precision = {.compute = compute, .loss_scale = given};
    complete(config, 1);
    EXPECT_EQ(config.precision.loss_scale, is) << compute << given;
  }
}

TEST(RunConfig, LossScalesThatAreRefused) {
  for (const char* text : {R"({"precision": {"loss_scale": -2}})",
                           R"({"precision": {"loss_scale": 1e39}})",
                           R"({"precision": {"initial_loss_scale": 0}})",
                           R"({"precision": {"min_loss_scale": 0}})",
                           R"({"precision": {"scale_growth_interval": 0}})",
                           R"({"precision": {"scale_hysteresis": 0}})"}) {
    EXPECT_NE(refusal(text), "") << text;
  }
  RunConfig config = minimal();
  config.precision = {.compute = "fp16", .initial_loss_scale = 0.5};
  EXPECT_NE(completed(config, 1).find("precision.min_loss_scale"),
            std::string::npos);
}

TEST(RunConfig, TypesOfGradients) {
  for (const auto& [compute, reduce, fits] : {std::tuple{"bf16", "bf16", true},
                                              {"bf16", "fp32", true},
                                              {"fp32", "fp32", true},
                                              {"fp64", "auto", true},
                                              {"fp32", "bf16", true},
                                              {"fp16", "auto", true},
                                              {"fp16", "fp16", true},
                                              {"bf16", "fp16", true},
                                              {"fp64", "fp32", false}}) {
    RunConfig config = minimal();
    config.precision = {.compute = compute, .reduce = reduce};
    const std::string message = refusal_of([&] { complete(config, 1); });
    EXPECT_EQ(message.empty(), fits) << message;
  }
}

TEST(RunConfig, Fp8ProductsAreOfBf16AndOfGpusThatHaveThem) {
  RunConfig config = minimal();
  config.precision = {.compute = "fp16", .products = "fp8"};
  EXPECT_EQ(completed(config, 1),
            "precision.products is fp8 and precision.compute fp16, but what is "
            "rounded to fp8 is bf16. Use precision.compute bf16, or "
            "precision.products same.");
  config.precision.compute = "bf16";
  config.run.device = "cpu";  // emulated
  EXPECT_EQ(completed(config, 1), "");
  const auto refused = [&](int capability) {
    return refusal_of([&] { check_products(config, capability); });
  };
  EXPECT_EQ(refused(86),
            "precision.products is fp8, but a GPU of this host has compute "
            "capability 8.6: 8.9 and later ones multiply it. Use "
            "precision.products same, or run.device cpu, which emulates it.");
  EXPECT_EQ(refused(89), "");
  EXPECT_EQ(refused(120), "");
  config.precision.products = "same";
  EXPECT_EQ(refused(80), "");
}

TEST(RunConfig, Experts) {
  const auto complaint = [](auto change, int64_t world) {
    RunConfig config = minimal();
    config.model.family = "mixtral";
    change(config);
    return refusal_of([&] { complete(config, world); });
  };
  EXPECT_EQ(complaint([](RunConfig& c) { c.mesh.ep = 4; }, 4), "");
  EXPECT_EQ(complaint(
                [](RunConfig& c) {
                  c.mesh.ep = 4;
                  c.model.moe.experts = 6;
                },
                4),
            "mesh.ep (4) does not divide model.moe.experts (6): every rank "
            "holds whole experts, as many as the others. Nearest mesh.ep: 3 or "
            "6; nearest model.moe.experts: 4 or 8.");
  EXPECT_EQ(complaint(
                [](RunConfig& c) {
                  c.mesh.ep = 2;
                  c.model.family = "llama";
                },
                4),
            "mesh.ep is 2, but model.family llama has no experts to share "
            "out. Use a model.family with experts (mixtral, qwen3_moe, "
            "deepseek_v3), or leave mesh.ep out.");
  EXPECT_EQ(complaint(
                [](RunConfig& c) {
                  c.model.moe.experts = 4;
                  c.model.family = "llama";
                },
                1),
            "model.moe.experts is 4, but model.family llama is dense. Use a "
            "model.family with experts (mixtral, qwen3_moe, deepseek_v3), or "
            "leave model.moe.experts out.");
  EXPECT_EQ(complaint([](RunConfig& c) { c.model.moe.top_k = 9; }, 1),
            "model.moe.top_k (9) is above model.moe.experts (8): a token goes "
            "to an expert once. Use 8 or less.");
  EXPECT_EQ(complaint([](RunConfig& c) { c.model.moe.every = 7; }, 1),
            "model.moe.every (7) is above model.layers (6): no layer would "
            "have experts. Use 6 or less.");
  EXPECT_EQ(complaint(
                [](RunConfig& c) {
                  c.mesh.data_parallel = "dp";
                  c.mesh.ep = 2;
                },
                4),
            "mesh.ep is 2, but with mesh.data_parallel dp every device has "
            "the whole model. Use 1, or mesh.data_parallel ddp.");
  EXPECT_EQ(complaint([](RunConfig& c) { c.mesh.ep = 3; }, 4),
            "mesh.ep is 3, which does not divide the dp_replicate 4 x dp_shard "
            "1 x cp 1 x tp 1 = 4 ranks of a stage over etp 1. Use a divisor of "
            "4.");
  EXPECT_EQ(complaint(
                [](RunConfig& c) {
                  c.mesh.tp = 4;
                  c.mesh.etp = 2;
                },
                4),
            "mesh.etp is 2. It is 1 (an expert is whole on its rank) or "
            "mesh.tp, 4.");
}

TEST(RunConfig, ExpertsAreShardedInsideAReplicaWhereTheyAreSharded) {
  RunConfig config = minimal();
  config.model.family = "mixtral";
  config.mesh.dp_replicate = config.mesh.dp_shard = config.mesh.ep = 2;
  config.zero.stage = 3;
  complete(config, 4);
  const auto replicas = [](const RunConfig& of) {
    return mesh_of(of, 4).degree(mesh::Axis::kExpertReplicate);
  };
  EXPECT_EQ(replicas(config), 1);
  config.zero.expert_shard = "dp_shard";
  EXPECT_EQ(replicas(config), 2);
  EXPECT_EQ(refusal_of([&] { complete(config, 4); }), "");
  config.mesh.ep = 4;
  EXPECT_EQ(refusal_of([&] { complete(config, 4); }),
            "mesh.ep is 4, but with expert_replicate 2 (zero.expert_shard "
            "dp_shard) experts stay "
            "inside one of the 2 replicas (mesh.dp_replicate), which has 2 "
            "ranks of a stage, over etp 1. Use a divisor of 2, or "
            "zero.expert_shard all.");
  // Where nothing is sharded there is nothing to keep inside.
  config.zero.expert_stage = 0;
  EXPECT_EQ(refusal_of([&] { complete(config, 4); }), "");
  EXPECT_EQ(replicas(config), 1);
  config.zero.expert_stage = -1;
  config.mesh.ep = 1;
  config.mesh.order = {"pp", "dp_shard", "dp_replicate", "cp", "tp"};
  EXPECT_EQ(refusal_of([&] { complete(config, 4); }),
            "mesh.order has dp_shard before dp_replicate, but with "
            "zero.expert_shard dp_shard experts stay inside a replica, whose "
            "ranks of a stage are neighbours then. Put dp_replicate before "
            "dp_shard, or use zero.expert_shard all.");
  config.model = minimal().model;
  EXPECT_EQ(refusal_of([&] { complete(config, 4); }), "");
}

TEST(RunConfig, SectionsThatDoNotFitTogether) {
  const auto with = [](const std::function<void(RunConfig&)>& change) {
    RunConfig config = minimal();
    change(config);
    return completed(config, 1);
  };
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(with([](auto& c) { c.data.train.clear(); }), "data.train is missing");
  expect(with([](auto& c) { c.data.seq_len = 2048; }),
         "data.seq_len (2048) is above model.max_seq (1024)");
  expect(with([](auto& c) { c.model.heads = 7; }),
         "model.hidden (320) is no multiple of model.heads (7). Use hidden "
         "322");
  expect(with([](auto& c) { c.model.kv_heads = 3; }),
         "model.heads (8) is no multiple of model.kv_heads (3)");
  expect(with([](auto& c) { c.model.head_dim = 33; }), "is odd");
  expect(with([](auto& c) {
           c.model.family = "gpt2";
           c.model.kv_heads = 4;
         }),
         "model.family gpt2 has as many kv_heads as heads");
  expect(with([](auto& c) { c.schedule.warmup = 2000; }),
         "schedule.warmup is 2000, longer than the run: run.steps is 1000");
  expect(with([](auto& c) { c.schedule.min_lr = 1.0; }),
         "schedule.min_lr (1) is above optimizer.lr");
  expect(with([](auto& c) {
           c.monitor.losses_late = 2;
           c.optimizer.skip_nonfinite = true;
         }),
         "monitor.losses_late is 2, but optimizer.skip_nonfinite is true has "
         "the host look at each step before the next one begins. Use "
         "monitor.losses_late 0.");
  expect(with([](auto& c) {
           c.monitor.losses_late = 2;
           c.precision.compute = "fp16";
         }),
         "precision.loss_scale is not 1");
  const auto falls = [](auto& c) {
    c.schedule.warmup = 10;
    c.schedule.start_lr = 1.0;
  };
  expect(with(falls), "schedule.start_lr (1) is above optimizer.lr");
}

TEST(RunConfig, ModelSizesThatFollow) {
  models::ModelConfig llama;
  llama.complete();
  EXPECT_EQ(llama.kv_heads, 8);
  EXPECT_EQ(llama.head_dim, 40);
  EXPECT_EQ(llama.ffn, 896);
  models::ModelConfig gpt2;
  gpt2.family = "gpt2";
  gpt2.complete();
  EXPECT_EQ(gpt2.ffn, 1280);
}

TEST(RunConfig, FilesAndOverrides) {
  const TemporaryFolder folder;
  write_file_atomic(folder.path() / "run.json",
                    "{\n  // small\n  \"run\": {\"steps\": 5}\n}\n");
  config::Provenance origins;
  const RunConfig config = read_run_config(
      folder.file("run.json"), {{"run.seed", "3", "--run.seed=3"}}, &origins);
  EXPECT_EQ(config.run.steps, 5);
  EXPECT_EQ(config.run.seed, 3);
  EXPECT_EQ(origins.at("run.steps"), folder.file("run.json") + ":3:20");
  EXPECT_EQ(origins.at("run.seed"), "--run.seed=3");
  EXPECT_THROW(read_run_config(folder.file("none.json")), Error);
  EXPECT_EQ(to_json(read_run_config("")), to_json(RunConfig{}));
}

// Of hosts with GPUs, read on one without.
TEST(RunConfig, OneThatWasSavedMayBeOfAnotherBuild) {
  const auto saved = [](const char* backend) {
    const std::string text =
        c10::str("{\"comm\": {\"backend\": \"", backend, "\"}}");
    return saved_run_config(text, "config.json").comm.backend;
  };
  for (const char* backend : {"nccl", "mpi"}) {
    EXPECT_EQ(saved(backend), backend);
  }
  EXPECT_THROW(saved("nccI"), Error);
}

}  // namespace
}  // namespace tessera::engine
