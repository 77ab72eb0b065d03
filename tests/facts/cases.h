// Models on meshes, of each of which one rank is played.
#pragma once

#include <vector>

#include "tessera/models/facts.h"

namespace tessera::testing {

using models::FactsOptions;
using models::ModelConfig;

struct Case {
  const char* name;
  ModelConfig model;
  mesh::Degrees degrees;
  FactsOptions options = {};
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
inline ModelConfig experts() {
  ModelConfig model = grouped("mixtral", 4);
  model.moe.experts = 8;
  model.ffn = 96;
  return model;
}

inline std::vector<Case> cases() {
  const FactsOptions plain{.samples = 2, .seq_len = 128};
  const auto with = [&](auto change) {
    FactsOptions options = plain;
    change(options);
    return options;
  };
  const auto sequence = with([](auto& o) { o.sequence_parallel = true; });
  const auto method = [&](const char* name) {
    return with([&](auto& o) { o.context_method = name; });
  };
  const auto zero = [&](int64_t stage) {
    return with([&](auto& o) { o.zero_stage = o.expert_zero_stage = stage; });
  };
  const auto llama = dense("llama"), gpt2 = dense("gpt2"), moe = experts();
  const auto qwen = grouped("qwen3", 4), few = grouped("llama", 2);
  ModelConfig odd = grouped("qwen2", 2);  // uneven cuts
  odd.vocab = 331;
  odd.ffn = 189;
  odd.tie_embeddings = false;
  ModelConfig mixed = experts();  // and dense layers
  mixed.moe.every = 2;
  mixed.moe.top_k = 1;
  ModelConfig wide = grouped("llama", 4);
  wide.hidden = 128;
  wide.head_dim = 24;
  const auto long_one = with([](auto& o) {
    o.samples = 1;
    o.seq_len = 1024;
  });
  const auto doubles = with([](auto& o) {
    o.compute = o.gradient = at::kDouble;
    o.samples = 3;
  });
  const auto halves = with([](auto& o) {
    o.compute = at::kBFloat16;
    o.zero_stage = 3;
    o.samples = 4;
  });
  const auto whole = with([](auto& o) {
    o.sequence_parallel = true;
    o.context_method = "allgather";
    o.zero_stage = 2;
  });
  return {
      {"llama", llama, {}, plain},
      {"gpt2", gpt2, {}, plain},
      {"qwen2 odd", odd, {}, plain},
      {"qwen3 fp64", qwen, {}, doubles},
      {"llama long", wide, {}, long_one},
      // oneDNN takes scratch of its own for bf16, which facts do not count.
      {"llama bf16", llama, {}, halves, 0, 0.5},
      {"llama bf16 sp zero3", llama, {.dp_shard = 2, .tp = 2}, halves, 1, 0.5},
      {"mixtral", moe, {}, plain},
      {"mixtral and dense", mixed, {}, plain},
      {"ddp 4", llama, {.dp_replicate = 4}, plain, 1},
      {"zero1 4", llama, {.dp_shard = 4}, zero(1), 3},
      {"zero2 3", odd, {.dp_shard = 3}, zero(2), 2},
      {"zero3 4", llama, {.dp_shard = 4}, zero(3), 2},
      {"zero3 hybrid", odd, {.dp_replicate = 2, .dp_shard = 4}, zero(3), 5},
      {"tp 2", qwen, {.tp = 2}, plain, 1},
      {"tp 4, 2 kv heads", few, {.tp = 4}, plain, 2},
      {"tp 3 gpt2",
       [&] {
         ModelConfig model = gpt2;
         model.heads = 6;
         model.hidden = 96;
         return model;
       }(),
       {.tp = 3},
       plain,
       2},
      {"tp 4 odd", odd, {.tp = 4}, plain, 3},
      {"sp 4", qwen, {.tp = 4}, sequence, 3},
      {"sp 2 gpt2", gpt2, {.tp = 2}, sequence, 1},
      {"sp 2 fp64",
       llama,
       {.tp = 2},
       with([](auto& o) {
         o.compute = o.gradient = at::kDouble;
         o.sequence_parallel = true;
       }),
       0},
      {"ring 2", llama, {.cp = 2}, plain, 1},
      {"ring 4 qwen3", qwen, {.cp = 4}, plain, 3},
      {"allgather 4", qwen, {.cp = 4}, method("allgather"), 0},
      {"ulysses 2", llama, {.cp = 2}, method("ulysses"), 1},
      {"ulysses 4, 2 kv heads", few, {.cp = 4}, method("ulysses"), 2},
      {"ulysses 2 long",
       wide,
       {.cp = 2},
       with([&](auto& o) {
         o = long_one;
         o.context_method = "ulysses";
       }),
       0},
      {"cp 2 x tp 2", qwen, {.cp = 2, .tp = 2}, plain, 3},
      {"cp 2 x sp 2 x zero2",
       qwen,
       {.dp_shard = 2, .cp = 2, .tp = 2},
       whole,
       5},
      {"pp 2 tied", llama, {.pp = 2}, plain, 1},
      {"pp 2 x tp 2 x zero3",
       odd,
       {.pp = 2, .dp_shard = 2, .tp = 2},
       zero(3),
       6},
      {"ep 4", moe, {.dp_shard = 4, .ep = 4}, plain, 1},
      {"ep 4 zero3", moe, {.dp_shard = 8, .ep = 4}, zero(3), 6},
      {"tp 2, ep 2 of it", moe, {.tp = 2, .ep = 2}, plain, 1},
      {"tp 2, ep 4", moe, {.dp_replicate = 2, .tp = 2, .ep = 4}, plain, 2},
      {"sp 2, ep 2", moe, {.tp = 2, .ep = 2}, sequence, 1},
      {"etp 2, ep 2",
       moe,
       {.dp_replicate = 2, .tp = 2, .ep = 2, .etp = 2},
       plain,
       3},
      {"etp 2 sp, ep 2",
       moe,
       {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2},
       sequence,
       2},
      {"cp 2, ep 4", mixed, {.dp_shard = 2, .cp = 2, .ep = 4}, zero(2), 3},
      {"all of it",
       moe,
       {.pp = 2, .dp_replicate = 2, .dp_shard = 2, .cp = 2, .tp = 2, .ep = 4},
       whole,
       21},
  };
}

}  // namespace tessera::testing
