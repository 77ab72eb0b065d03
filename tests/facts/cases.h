// Models on meshes, of each of which one rank is played.
#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model_config.h"

namespace tessera::testing {

using models::ModelConfig;

// A micro-batch and what is done with the model.
struct CaseOptions {
  int64_t samples = 1;
  int64_t seq_len = 1;
  std::string compute = "fp32", products = "same";
  bool sequence_parallel = false;
  std::string context_method = "ring";
  int64_t zero_stage = 0;
  int64_t dispatch_chunks = 0;
};

struct Case {
  const char* name;
  ModelConfig model;
  mesh::Degrees degrees;
  CaseOptions options = {};
  int64_t rank = 0;
  double peak = 0.03;  // how far it may be off
};

inline ModelConfig dense(const char* family) {
  ModelConfig model;
  model.family = family;
  model.layers = 2;
  model.hidden = 64;
  model.heads = 8;
  model.vocab = 320;
  model.max_seq = 1024;
  return model;
}
inline ModelConfig grouped(const char* family, int64_t kv_heads) {
  ModelConfig model = dense(family);
  model.kv_heads = kv_heads;
  return model;
}
// Cut unevenly.
inline ModelConfig odd() {
  ModelConfig model = grouped("qwen2", 2);
  model.vocab = 331;
  model.ffn = 189;
  model.tie_embeddings = false;
  return model;
}
inline ModelConfig wide() {
  ModelConfig model = grouped("llama", 4);
  model.hidden = 128;
  model.head_dim = 24;
  return model;
}
// Logits that are made in lots.
inline ModelConfig many_entries() {
  ModelConfig model = dense("llama");
  model.vocab = 9001;
  return model;
}
inline ModelConfig six_heads() {
  ModelConfig model = dense("gpt2");
  model.heads = 6;
  model.hidden = 96;
  return model;
}
inline ModelConfig experts() {
  ModelConfig model = grouped("mixtral", 4);
  model.moe.experts = 8;
  model.ffn = 96;
  return model;
}
inline ModelConfig experts_and_dense() {
  ModelConfig model = experts();
  model.moe.every = 2;
  model.moe.top_k = 1;
  return model;
}

// All that a gate may do beside.
inline ModelConfig gated_experts() {
  ModelConfig model = experts();
  model.moe.ffn = 72;
  model.moe.score = "sigmoid";
  model.moe.groups = 4;
  model.moe.top_groups = 2;
  model.moe.scale = 2.0;
  model.moe.capacity_factor = 1.0;
  model.moe.shared_experts = 2;
  model.moe.z_loss = 0.1;
  model.moe.bias_balance = true;
  return model;
}
// Of whose width the last of four ranks has nothing.
inline ModelConfig narrow_shared() {
  ModelConfig model = gated_experts();
  model.moe.ffn = 6;
  model.moe.shared_experts = 1;
  return model;
}
inline ModelConfig choosing_experts() {
  ModelConfig model = experts();
  model.moe.choice = "experts";
  model.moe.capacity_factor = 1.0;
  return model;
}
inline ModelConfig noisy_experts() {
  ModelConfig model = experts();
  model.moe.noise = true;
  return model;
}
inline ModelConfig balanced(ModelConfig model, const char* over) {
  model.moe.balance = over;
  return model;
}
inline ModelConfig latent() {
  ModelConfig model = dense("deepseek_v3");
  model.ffn = 96;
  model.head_dim = 24;
  model.latent = {.q_rank = 40, .kv_rank = 32, .rope_dim = 8, .value_dim = 16};
  model.moe.experts = 8;
  model.moe.ffn = 48;
  model.moe.first_dense = 1;
  model.moe.shared_experts = 1;
  return model;
}

inline ModelConfig ahead(int64_t depths) {
  ModelConfig model = latent();
  model.mtp.layers = depths;
  return model;
}

// A layer with a window, and one that sees all.
inline ModelConfig with_window(ModelConfig model, int64_t window) {
  model.family = "qwen3";
  model.window = window;
  model.window_every = 2;
  return model;
}
// Layers that turn by two bases, and scores of another scale.
inline ModelConfig gemma() {
  ModelConfig model = grouped("gemma3_text", 2);
  model.head_dim = 16;
  model.query_pre_attn_scalar = 24;
  model.window = 64;
  model.window_every = 2;
  model.rope_theta_local = 100.0;
  return model;
}

inline ModelConfig with_dropout(ModelConfig model) {
  model.dropout = 0.1;
  return model;
}

inline CaseOptions plain() { return {.samples = 2, .seq_len = 128}; }
inline CaseOptions long_one() { return {.samples = 1, .seq_len = 1024}; }
inline CaseOptions two_long() { return {.samples = 2, .seq_len = 600}; }
inline CaseOptions method(const char* name, CaseOptions options = plain()) {
  options.context_method = name;
  return options;
}
inline CaseOptions zero(int64_t stage, CaseOptions options = plain()) {
  options.zero_stage = stage;
  return options;
}
inline CaseOptions in_chunks(CaseOptions options = plain()) {
  options.dispatch_chunks = 2;
  return options;
}
inline CaseOptions sequence(CaseOptions options = plain()) {
  options.sequence_parallel = true;
  return options;
}
inline CaseOptions doubles() {
  CaseOptions options = plain();
  options.compute = "fp64";
  options.samples = 3;
  return options;
}
inline CaseOptions halves() {
  CaseOptions options = zero(3);
  options.compute = "bf16";
  options.samples = 4;
  return options;
}
inline CaseOptions fp8() {
  CaseOptions options = halves();
  options.products = "fp8";
  return options;
}

inline std::vector<Case> cases_of_one_rank() {
  return {
      {"llama", dense("llama"), {}, plain()},
      {"gpt2", dense("gpt2"), {}, plain()},
      {"qwen2 odd", odd(), {}, plain()},
      {"qwen3 fp64", grouped("qwen3", 4), {}, doubles()},
      {"olmo2", grouped("olmo2", 4), {}, plain()},
      {"gemma3", gemma(), {}, plain()},
      {"gemma3 fp64", gemma(), {}, doubles()},
      {"phi3", grouped("phi3", 4), {}, plain()},
      {"llama long", wide(), {}, long_one()},
      {"llama many entries", many_entries(), {}, two_long()},
      // oneDNN takes scratch of its own for bf16, which facts do not count.
      {"llama bf16", dense("llama"), {}, halves(), 0, 0.5},
      {"llama fp8", dense("llama"), {}, fp8(), 0, 0.1},
      {"tp 2 gpt2 fp8", dense("gpt2"), {.tp = 2}, fp8(), 1, 0.1},
      {"mixtral", experts(), {}, plain()},
      {"mixtral and dense", experts_and_dense(), {}, plain()},
      {"gated experts", gated_experts(), {}, plain()},
      {"noisy experts", noisy_experts(), {}, plain()},
      {"choosing experts", choosing_experts(), {}, plain()},
      {"deepseek", latent(), {}, plain()},
      {"deepseek fp64", latent(), {}, doubles()},
      {"deepseek ahead", ahead(2), {}, plain()},
      {"deepseek ahead dropout", with_dropout(ahead(1)), {}, doubles()},
      {"llama dropout", with_dropout(wide()), {}, two_long()},
      {"gpt2 dropout", with_dropout(dense("gpt2")), {}, doubles()},
      {"gemma3 dropout", with_dropout(gemma()), {}, plain()},
      {"olmo2 dropout", with_dropout(grouped("olmo2", 4)), {}, plain()},
      {"mixtral dropout", with_dropout(experts_and_dense()), {}, plain()},
      {"window", with_window(grouped("qwen3", 4), 50), {}, plain()},
      {"window of all", with_window(grouped("qwen3", 4), 128), {}, doubles()},
      {"window long", with_window(wide(), 100), {}, long_one()},
  };
}

inline std::vector<Case> cases_of_data_and_stages() {
  const auto llama = dense("llama");
  return {
      {"ddp 4", llama, {.dp_replicate = 4}, plain(), 1},
      {"zero1 4", llama, {.dp_shard = 4}, zero(1), 3},
      {"zero2 3", odd(), {.dp_shard = 3}, zero(2), 2},
      {"zero3 4", llama, {.dp_shard = 4}, zero(3), 2},
      {"zero3 hybrid", odd(), {.dp_replicate = 2, .dp_shard = 4}, zero(3), 5},
      {"bf16 tp 2 zero3", llama, {.dp_shard = 2, .tp = 2}, halves(), 1, 0.5},
      {"pp 2 gemma3", gemma(), {.pp = 2}, plain(), 1},
      {"pp 2 tied", llama, {.pp = 2}, plain(), 1},
      {"pp 2 tp 2 zero3", odd(), {.pp = 2, .dp_shard = 2, .tp = 2}, zero(3), 6},
  };
}

inline std::vector<Case> cases_of_tensor_and_context() {
  const auto llama = dense("llama");
  const auto qwen = grouped("qwen3", 4), few = grouped("llama", 2);
  const auto olmo = grouped("olmo2", 2);
  const auto dropped = with_dropout(grouped("llama", 4));
  const auto dropped_gpt2 = with_dropout(dense("gpt2"));
  const auto window = with_window(grouped("qwen3", 4), 40);
  const auto narrow = with_window(grouped("qwen3", 4), 10);
  const auto ulysses = method("ulysses");
  const auto long_ulysses = method("ulysses", long_one());
  const auto whole = sequence(zero(2, method("allgather")));
  const mesh::Degrees data_too{.dp_shard = 2, .cp = 2, .tp = 2};
  return {
      {"tp 2", qwen, {.tp = 2}, plain(), 1},
      {"tp 4, 2 kv heads", few, {.tp = 4}, plain(), 2},
      {"tp 3 gpt2", six_heads(), {.tp = 3}, plain(), 2},
      {"tp 2 many entries", many_entries(), {.tp = 2}, two_long(), 1},
      {"tp 4 odd", odd(), {.tp = 4}, plain(), 3},
      {"sp 4", qwen, {.tp = 4}, sequence(), 3},
      {"sp 2 gpt2", dense("gpt2"), {.tp = 2}, sequence(), 1},
      {"tp 4 olmo2, 2 kv heads", olmo, {.tp = 4}, plain(), 2},
      {"tp 4 gemma3, 2 kv heads", gemma(), {.tp = 4}, plain(), 3},
      {"sp 2 gemma3", gemma(), {.tp = 2}, sequence(), 1},
      {"ring 2 gemma3", gemma(), {.cp = 2}, plain(), 1},
      {"sp 2 olmo2", olmo, {.tp = 2}, sequence(), 1},
      {"tp 2 olmo2 bf16", olmo, {.dp_shard = 2, .tp = 2}, halves(), 1, 0.5},
      {"sp 2 fp64", llama, {.tp = 2}, sequence(doubles()), 0},
      {"ring 2", llama, {.cp = 2}, plain(), 1},
      {"ring 4 qwen3", qwen, {.cp = 4}, plain(), 3},
      {"allgather 4", qwen, {.cp = 4}, method("allgather"), 0},
      {"ulysses 2", llama, {.cp = 2}, ulysses, 1},
      {"ulysses 4, 2 kv heads", few, {.cp = 4}, ulysses, 2},
      {"ulysses 2 long", wide(), {.cp = 2}, long_ulysses, 0},
      {"cp 2 x tp 2", qwen, {.cp = 2, .tp = 2}, plain(), 3},
      {"cp 2 x sp 2 x zero2", qwen, data_too, whole, 5},
      {"sp 2 gpt2 dropout", dropped_gpt2, {.tp = 2}, sequence(), 1},
      {"ring 2 dropout", dropped, {.cp = 2}, plain(), 1},
      {"allgather 4 dropout", dropped, {.cp = 4}, method("allgather"), 2},
      {"ulysses 2 x tp 2 dropout", dropped, {.cp = 2, .tp = 2}, ulysses, 3},
      {"ring 2 window", window, {.cp = 2}, plain(), 1},
      {"ring 4 window", narrow, {.cp = 4}, plain(), 0},
      {"ring 4 window fp64", window, {.cp = 4}, doubles(), 3},
      {"allgather 4 window", window, {.cp = 4}, method("allgather"), 2},
      {"ulysses 2 window", narrow, {.cp = 2}, ulysses, 1},
  };
}

inline std::vector<Case> cases_of_experts() {
  using mesh::Degrees;
  const auto moe = experts();
  const auto whole = sequence(zero(2, method("allgather")));
  const Degrees cut{.dp_replicate = 2, .tp = 2, .ep = 2, .etp = 2};
  const Degrees cut_too{.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2};
  const Degrees mixed{.dp_shard = 2, .cp = 2, .ep = 4};
  const Degrees inside{.dp_replicate = 2,
                       .dp_shard = 4,
                       .tp = 2,
                       .ep = 2,
                       .expert_replicate = 2};
  const Degrees cut_inside{.dp_replicate = 2,
                           .dp_shard = 2,
                           .tp = 2,
                           .etp = 2,
                           .expert_replicate = 2};
  const Degrees alone{
      .dp_replicate = 2, .dp_shard = 4, .ep = 4, .expert_replicate = 2};
  const Degrees all{
      .pp = 2, .dp_replicate = 2, .dp_shard = 2, .cp = 2, .tp = 2, .ep = 4};
  return {
      {"ep 4", moe, {.dp_shard = 4, .ep = 4}, plain(), 1},
      {"ep 4 zero3", moe, {.dp_shard = 8, .ep = 4}, zero(3), 6},
      {"tp 2, ep 2 of it", moe, {.tp = 2, .ep = 2}, plain(), 1},
      {"tp 2, ep 4", moe, {.dp_replicate = 2, .tp = 2, .ep = 4}, plain(), 2},
      {"sp 2, ep 2", moe, {.tp = 2, .ep = 2}, sequence(), 1},
      {"etp 2, ep 2", moe, cut, plain(), 3},
      {"etp 2 sp, ep 2", moe, cut_too, sequence(), 2},
      {"cp 2, ep 4", experts_and_dense(), mixed, zero(2), 3},
      {"gated, cp 2, ep 4", gated_experts(), mixed, zero(2), 3},
      {"gated, etp 2, ep 2", gated_experts(), cut, plain(), 3},
      {"gated in chunks, tp 2, ep 2",
       gated_experts(),
       {.tp = 2, .ep = 2},
       in_chunks(),
       1},
      {"shared narrow, ep 2 of tp 4",
       narrow_shared(),
       {.tp = 4, .ep = 2},
       plain(),
       3},
      {"choosing, ep 4 zero3",
       choosing_experts(),
       {.dp_shard = 8, .ep = 4},
       zero(3),
       6},
      {"noisy, cp 2, ep 4", noisy_experts(), mixed, zero(2), 3},
      {"layer, cp 2, ep 4", balanced(gated_experts(), "layer"), mixed, zero(2),
       3},
      {"layer, etp 2, ep 2", balanced(moe, "layer"), cut, plain(), 3},
      {"batch, cp 2, ep 4", balanced(experts_and_dense(), "batch"), mixed,
       zero(2), 3},
      {"batch, sp 2, ep 2",
       balanced(experts_and_dense(), "batch"),
       {.tp = 2, .ep = 2},
       sequence(),
       1},
      {"ep 2 zero1 by replica", moe, inside, zero(1), 13},
      {"ep 2 zero3 by replica", moe, inside, zero(3), 6},
      {"etp 2 zero2 by replica", moe, cut_inside, zero(2), 5},
      {"all of a replica", moe, alone, zero(3), 5},
      {"deepseek, sp 2, ep 2", latent(), {.tp = 2, .ep = 2}, sequence(), 1},
      {"deepseek ahead, tp 2", ahead(1), {.tp = 2}, plain(), 1},
      {"deepseek ahead, sp 2, ep 2",
       ahead(2),
       {.tp = 2, .ep = 2},
       sequence(),
       1},
      {"deepseek ahead, cp 2", ahead(2), {.cp = 2}, plain(), 1},
      {"deepseek ahead, pp 2 x zero3",
       ahead(2),
       {.pp = 2, .dp_shard = 2},
       zero(3),
       2},
      {"all of it", moe, all, whole, 21},
  };
}

inline std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& some : {cases_of_one_rank(), cases_of_data_and_stages(),
                           cases_of_tensor_and_context(), cases_of_experts()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace tessera::testing
