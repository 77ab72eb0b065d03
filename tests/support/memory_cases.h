// Runs in which what ranks hold is compared, instruction by instruction, with
// what facts say: of every strategy, schedule and way of recomputing.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

using Change = std::function<void(RunConfig&)>;

struct MemoryCase {
  const char* name;
  mesh::Degrees degrees = {};
  Change change = [](RunConfig&) {};
  int64_t microbatches = 1;
};

inline std::ostream& operator<<(std::ostream& out, const MemoryCase& each) {
  return out << each.name;
}

inline constexpr int64_t kSeqLen = 128, kVocab = 512;

inline RunConfig memory_run(const MemoryCase& of) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = kSeqLen;
  config.model.layers = 4;
  config.model.hidden = 64;
  config.model.heads = 8;
  config.model.vocab = kVocab;
  config.run.threads = 1;
  const auto& degrees = of.degrees;
  config.mesh.dp_replicate = degrees.dp_replicate;
  config.mesh.dp_shard = degrees.dp_shard;
  config.mesh.pp = degrees.pp;
  config.mesh.cp = degrees.cp;
  config.mesh.tp = degrees.tp;
  config.mesh.ep = degrees.ep;
  config.mesh.etp = degrees.etp;
  config.zero.prefetch = 1;
  config.expert.dispatch_chunks = 0;
  config.batch.micro = 2;
  config.batch.global = degrees.dp_replicate * degrees.dp_shard *
                        of.microbatches * config.batch.micro;
  of.change(config);
  complete(config, implied_world_size(config));
  return config;
}

inline Change zero(int64_t stage, bool reshard = true) {
  return [=](RunConfig& config) {
    config.zero.stage = stage;
    config.zero.reshard_after_forward = reshard;
  };
}
inline Change also(const Change& one, const Change& other) {
  return [=](RunConfig& config) {
    one(config);
    other(config);
  };
}
inline Change schedule(const char* name, int64_t chunks = 1) {
  return [=](RunConfig& config) {
    config.pipeline.schedule = name;
    config.pipeline.chunks = chunks;
  };
}
inline Change context(const char* method) {
  return [=](RunConfig& config) { config.context.method = method; };
}
inline Change type(const char* name) {
  return [=](RunConfig& config) { config.precision.compute = name; };
}
inline Change reduce(const char* name) {
  return [=](RunConfig& config) { config.precision.reduce = name; };
}
inline Change recompute(int64_t every) {
  return [=](RunConfig& config) {
    config.recompute = {.mode = "block", .every = every};
  };
}
inline Change whole_stage(int64_t every = 0) {
  return [=](RunConfig& config) {
    config.recompute = {.mode = "stage", .every = every};
  };
}
inline void selective(RunConfig& config) {
  config.recompute.mode = "selective";
}
inline void minimal(RunConfig& config) { config.recompute.mode = "minimal"; }
inline Change family(const char* name) {
  return [=](RunConfig& config) { config.model.family = name; };
}
inline Change adapters(std::vector<std::string> targets = {}) {
  return [targets = std::move(targets)](RunConfig& config) {
    config.model.lora.rank = 4;
    config.model.lora.targets = targets;
  };
}
inline void documents(RunConfig& config) {
  config.data.intra_document_masking = true;
}
inline void muon(RunConfig& config) { config.optimizer.type = "muon"; }
inline void bf16_states(RunConfig& config) {
  config.optimizer.state_dtype = "bf16";
}
inline void averages(RunConfig& config) { config.optimizer.ema = 0.99; }
inline void sequence(RunConfig& config) {
  config.tensor.sequence_parallel = true;
}
// Weights so large that they travel alone, of which one has rows that do not
// divide by four.
inline void wide(RunConfig& config) {
  config.model.layers = 1;
  config.model.hidden = 272;
  config.model.heads = 4;
  config.model.head_dim = 64;
  config.model.ffn = 1030;
}
inline Change by_replica(int64_t stage) {
  return [=](RunConfig& config) {
    config.zero.stage = stage;
    config.zero.expert_shard = "dp_shard";
  };
}
inline void experts(RunConfig& config) {
  config.model.family = "mixtral";
  config.model.kv_heads = 4;
  config.model.moe.experts = 8;
  config.model.ffn = 96;
}

inline void ahead(RunConfig& config) {
  experts(config);
  config.model.family = "deepseek_v3";
  config.model.kv_heads = 0;
  config.model.mtp.layers = 2;
}

// Micro-batches so small, beside weights so large, that their rows wait.
inline void waiting(RunConfig& config) {
  config.model.hidden = 512;
  config.model.ffn = 768;
  config.batch.micro = 1;
}

inline void dropout(RunConfig& config) { config.model.dropout = 0.1; }

inline Change offload(const char* what) {
  return [=](RunConfig& config) { config.zero.offload = what; };
}

inline void one_reads(RunConfig& config) { config.data.reader = "first"; }

inline std::vector<MemoryCase> cases() {
  return {
      {"one rank"},
      {"accumulation", {}, zero(0), 3},
      {"fp64", {}, type("fp64"), 2},
      {"bf16", {}, type("bf16"), 2},
      {"fp16", {}, type("fp16"), 2},
      {"bf16 reduced in it", {}, also(type("bf16"), reduce("bf16")), 2},
      {"fp16 reduced in it", {}, also(type("fp16"), reduce("fp16")), 2},
      {"fp32 reduced in bf16", {.dp_shard = 2}, also(zero(2), reduce("bf16"))},
      {"gpt2", {}, family("gpt2")},
      {"recompute", {}, recompute(1), 2},
      {"ddp", {.dp_replicate = 2}, zero(0), 2},
      {"zero1", {.dp_shard = 2}, zero(1), 2},
      {"zero2", {.dp_shard = 2}, zero(2), 2},
      {"zero3", {.dp_shard = 4}, zero(3), 2},
      {"zero3 whole", {.dp_shard = 2}, zero(3, false), 2},
      {"zero3 recompute", {.dp_shard = 2}, also(zero(3), recompute(2)), 2},
      {"zero3 fp64", {.dp_shard = 2}, also(zero(3), type("fp64")), 2},
      {"zero3 bf16", {.dp_shard = 2}, also(zero(3), type("bf16")), 2},
      {"zero1 hybrid", {.dp_replicate = 2, .dp_shard = 2}, zero(1), 2},
      {"zero2 hybrid", {.dp_replicate = 2, .dp_shard = 2}, zero(2), 2},
      {"wide zero1", {.dp_shard = 2}, also(zero(1), wide), 2},
      {"wide zero2", {.dp_shard = 2}, also(zero(2), wide), 2},
      {"wide zero3", {.dp_shard = 4}, also(zero(3), wide), 2},
      {"wide zero3 bf16",
       {.dp_shard = 2},
       also(also(zero(3), type("bf16")), wide)},
      {"wide zero3 fp16",
       {.dp_shard = 2},
       also(also(zero(3), type("fp16")), wide)},
      {"wide hybrid",
       {.dp_replicate = 2, .dp_shard = 2},
       also(zero(1), wide),
       2},
      {"tp", {.tp = 2}, zero(0), 2},
      {"tp zero3", {.dp_shard = 2, .tp = 2}, zero(3), 2},
      {"tp sequence", {.tp = 2}, sequence, 2},
      {"tp sequence bf16", {.tp = 2}, also(sequence, type("bf16"))},
      {"ring", {.cp = 2}, context("ring"), 2},
      {"ulysses", {.cp = 2}, context("ulysses"), 2},
      {"allgather", {.cp = 2}, context("allgather"), 2},
      {"cp zero2", {.dp_shard = 2, .cp = 2}, zero(2), 2},
      {"1f1b", {.pp = 2}, schedule("1f1b"), 4},
      {"gpipe", {.pp = 2}, schedule("gpipe"), 4},
      {"interleaved", {.pp = 2}, schedule("interleaved", 2), 4},
      {"bfs", {.pp = 2}, schedule("bfs", 2), 4},
      {"1f1b of four", {.pp = 4, .tp = 2}, zero(0), 6},
      {"zb_h1", {.pp = 2}, schedule("zb_h1"), 4},
      {"zb_h1 gpt2 bf16",
       {.pp = 2},
       also(also(family("gpt2"), type("bf16")), schedule("zb_h1")),
       4},
      {"zb_h1 experts", {.pp = 2}, also(experts, schedule("zb_h1")), 4},
      {"zb_h1 adapters", {.pp = 2}, also(adapters(), schedule("zb_h1")), 4},
      {"zb_h2 zero3",
       {.pp = 2, .dp_shard = 2},
       also(zero(3), schedule("zb_h2")),
       4},
      {"interleaved_zb tp sequence",
       {.pp = 2, .tp = 2},
       also(sequence, schedule("interleaved_zb", 2)),
       4},
      {"zb_v", {.pp = 2}, schedule("zb_v", 2), 4},
      {"zb_v recompute", {.pp = 2}, also(recompute(2), schedule("zb_v", 2)), 4},
      {"dualpipe", {.pp = 2}, schedule("dualpipe", 2), 4},
      {"dualpipe_v stage",
       {.pp = 2},
       also(whole_stage(), schedule("dualpipe_v", 2)),
       4},
      {"pipedream", {.pp = 2}, schedule("pipedream_2bw"), 4},
      {"pipedream of four", {.pp = 4}, schedule("pipedream_2bw"), 5},
      {"pipedream zero1",
       {.pp = 2, .dp_shard = 2},
       also(zero(1), schedule("pipedream_2bw")),
       4},
      {"pipedream zero3",
       {.pp = 2, .dp_shard = 2},
       also(zero(3), schedule("pipedream_2bw")),
       4},
      {"pipedream recompute",
       {.pp = 2},
       also(recompute(2), schedule("pipedream_2bw")),
       4},
      {"pipedream adapters",
       {.pp = 2},
       also(adapters(), schedule("pipedream_2bw")),
       4},
      {"1f1b zero1", {.pp = 2, .dp_shard = 2}, zero(1), 4},
      {"1f1b zero3", {.pp = 2, .dp_shard = 2}, zero(3), 3},
      {"1f1b recompute", {.pp = 2}, recompute(1), 4},
      {"stage", {}, whole_stage(), 2},
      {"stage by two", {}, whole_stage(2), 2},
      {"stage gpipe", {.pp = 2}, also(whole_stage(), schedule("gpipe")), 4},
      {"stage 1f1b zero3",
       {.pp = 2, .dp_shard = 2},
       also(whole_stage(), zero(3)),
       4},
      {"stage interleaved",
       {.pp = 2},
       also(whole_stage(), schedule("interleaved", 2)),
       4},
      {"stage tp sequence", {.tp = 2}, also(whole_stage(), sequence), 2},
      {"offload", {}, offload("optimizer"), 2},
      {"offload all", {}, offload("all"), 2},
      {"offload all zero1", {.dp_shard = 2}, also(zero(1), offload("all")), 2},
      {"offload all zero3", {.dp_shard = 2}, also(zero(3), offload("all")), 2},
      {"offload all alone", {}, also(zero(3), offload("all")), 2},
      {"offload all alone wide bf16",
       {},
       also(also(zero(3), offload("all")), also(type("bf16"), wide)),
       2},
      {"offload all adapters alone",
       {},
       also(also(zero(3), offload("all")), adapters()),
       2},
      {"offload all replicas",
       {.dp_replicate = 2},
       also(zero(3), offload("all")),
       2},
      {"offload 1f1b", {.pp = 2}, offload("all"), 4},
      {"one reads 1f1b", {.pp = 2}, one_reads, 4},
      {"one reads documents", {.pp = 2}, also(documents, one_reads), 4},
      {"one reads ring", {.cp = 2}, also(context("ring"), one_reads), 2},
      {"minimal", {}, minimal, 2},
      {"minimal 1f1b", {.pp = 2}, minimal, 4},
      {"minimal gpipe", {.pp = 2}, also(minimal, schedule("gpipe")), 4},
      {"minimal zero3", {.dp_shard = 2}, also(minimal, zero(3)), 2},
      {"minimal tp", {.tp = 2}, minimal, 2},
      {"minimal experts", {}, also(experts, minimal), 2},
      {"minimal adapters", {}, also(adapters(), minimal), 2},
      {"selective", {}, selective, 2},
      {"selective gpt2 bf16",
       {},
       also(also(family("gpt2"), type("bf16")), selective),
       2},
      {"selective tp zero3",
       {.dp_shard = 2, .tp = 2},
       also(selective, zero(3)),
       2},
      {"selective 1f1b", {.pp = 2}, selective, 4},
      {"selective ring", {.cp = 2}, also(context("ring"), selective), 2},
      {"selective ulysses", {.cp = 2}, also(context("ulysses"), selective), 2},
      {"selective allgather",
       {.cp = 2},
       also(context("allgather"), selective),
       2},
      {"selective experts", {}, also(experts, selective), 2},
      {"selective adapters", {}, also(adapters(), selective), 2},
      {"selective documents", {}, also(documents, selective), 2},
      {"adapters", {}, adapters(), 2},
      {"adapters of some", {}, adapters({"attention.q", "mlp.down"}), 2},
      {"adapters zero3", {.dp_shard = 2}, also(adapters(), zero(3)), 2},
      {"adapters zero1", {.dp_shard = 2}, also(adapters(), zero(1)), 2},
      {"adapters tp", {.tp = 2}, adapters(), 2},
      {"adapters 1f1b", {.pp = 2}, also(adapters(), schedule("1f1b")), 4},
      {"documents", {}, documents, 2},
      {"documents gpt2", {}, also(family("gpt2"), documents)},
      {"documents bf16", {}, also(type("bf16"), documents)},
      {"documents ring", {.cp = 2}, also(context("ring"), documents), 2},
      {"documents ulysses", {.cp = 2}, also(context("ulysses"), documents)},
      {"documents allgather", {.cp = 2}, also(context("allgather"), documents)},
      {"documents 1f1b", {.pp = 4}, documents, 4},
      {"experts", {}, experts, 2},
      {"ep", {.dp_shard = 2, .ep = 2}, also(experts, zero(1)), 2},
      {"ep fp16", {.dp_shard = 2, .ep = 2}, also(experts, type("fp16"))},
      {"ep zero3", {.dp_shard = 4, .ep = 2}, also(experts, zero(3))},
      {"ep zero1 by replica",
       {.dp_replicate = 2, .dp_shard = 2, .ep = 2},
       also(experts, by_replica(1)),
       2},
      {"ep tp zero2 by replica",
       {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 2},
       also(experts, by_replica(2)),
       2},
      {"zero3 by replica",
       {.dp_replicate = 2, .dp_shard = 2},
       also(experts, by_replica(3)),
       2},
      {"ep tp", {.dp_replicate = 2, .tp = 2, .ep = 2, .etp = 2}, experts},
      {"ep pp", {.pp = 2, .dp_replicate = 2, .ep = 2}, experts, 2},
      {"ahead", {}, ahead, 2},
      {"ahead tp one reads", {.tp = 2}, also(ahead, one_reads), 2},
      {"ahead ring", {.cp = 2}, ahead, 2},
      {"ahead ring one reads", {.cp = 2}, also(ahead, one_reads), 2},
      {"ahead stage", {}, also(ahead, whole_stage()), 2},
      {"ahead pp zero3", {.pp = 2, .dp_shard = 2}, also(ahead, zero(3)), 2},
      {"ahead zb_h1", {.pp = 2}, also(ahead, schedule("zb_h1")), 4},
      {"waiting", {}, waiting, 2},
      {"waiting gpt2 bf16",
       {},
       also(also(waiting, family("gpt2")), type("bf16")),
       2},
      {"waiting fp16", {}, also(waiting, type("fp16")), 2},
      {"waiting zero1 ring",
       {.dp_shard = 2, .cp = 2},
       also(also(waiting, zero(1)), context("ring")),
       2},
      {"waiting zero2", {.dp_shard = 2}, also(waiting, zero(2)), 2},
      {"waiting tp sequence", {.tp = 2}, also(waiting, sequence), 2},
      {"waiting 1f1b", {.pp = 2}, also(waiting, schedule("1f1b")), 2},
      {"waiting zb_h1", {.pp = 2}, also(waiting, schedule("zb_h1")), 2},
      {"waiting dualpipe",
       {.pp = 2},
       also(waiting, schedule("dualpipe", 2)),
       3},
      {"waiting pipedream",
       {.pp = 2},
       also(waiting, schedule("pipedream_2bw")),
       2},
      {"waiting stage recompute", {}, also(waiting, whole_stage()), 2},
      {"waiting ahead", {}, also(ahead, waiting), 2},
      {"waiting ahead pp", {.pp = 2}, also(ahead, waiting), 2},
      {"waiting interleaved",
       {.pp = 2},
       also(waiting, schedule("interleaved", 2)),
       3},
      {"waiting pp zero1", {.pp = 2, .dp_shard = 2}, also(waiting, zero(1)), 2},
      {"dropout", {}, dropout, 2},
      {"dropout gpt2 bf16",
       {},
       also(also(family("gpt2"), type("bf16")), dropout)},
      {"dropout tp sequence", {.tp = 2}, also(sequence, dropout), 2},
      {"dropout minimal experts", {}, also(also(experts, minimal), dropout), 2},
      {"dropout selective ring", {.cp = 2}, also(selective, dropout), 2},
      {"dropout allgather", {.cp = 2}, also(context("allgather"), dropout), 2},
      {"dropout documents", {}, also(documents, dropout), 2},
      {"muon", {}, muon},
      {"muon bf16", {}, also(muon, type("bf16"))},
      {"muon zero2", {.dp_shard = 2}, also(muon, zero(2))},
      {"muon zero3 bf16 wide",
       {.dp_shard = 2},
       also(also(muon, zero(3)), also(type("bf16"), wide))},
      {"muon zero1 tp hybrid",
       {.dp_replicate = 2, .dp_shard = 2, .tp = 2},
       also(muon, zero(1))},
      {"muon pp tp", {.pp = 2, .tp = 2}, muon, 4},
      {"muon experts", {}, also(experts, muon)},
      {"muon experts bf16", {}, also(also(experts, muon), type("bf16"))},
      {"muon ep zero3",
       {.dp_shard = 4, .ep = 2},
       also(also(experts, muon), zero(3))},
      {"muon zero2 by replica",
       {.dp_replicate = 2, .dp_shard = 2},
       also(also(experts, muon), by_replica(2))},
      {"muon ep tp",
       {.dp_replicate = 2, .tp = 2, .ep = 2, .etp = 2},
       also(experts, muon)},
      {"muon bf16 states", {}, also(muon, bf16_states)},
      {"bf16 states zero2",
       {.dp_shard = 2},
       also(also(bf16_states, averages), zero(2))},
      {"all", {.pp = 2, .dp_shard = 2, .cp = 2}, zero(2), 2},
  };
}

}  // namespace tessera::engine
