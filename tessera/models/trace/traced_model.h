// A model as one rank runs it, in numbers: its sizes, and the seams of
// models::Model, in which strategies put what ranks do together. None of them
// knows which model it is, and a model no strategy.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tessera/models/model_config.h"
#include "tessera/models/trace/operators.h"
#include "tessera/nn/fp8_product.h"

namespace tessera::models::trace {

// nn::Region. Empty functions: of one rank.
using Transform = std::function<Traced(const Operators& ops, const Traced& x)>;
struct Region {
  Transform enter;
  Transform leave;
};

// nn::SummedLoss: of so many rows, `chunk` of them at a time, over `columns`.
struct LossShape {
  int64_t rows, chunk, columns;
};
using SummedLoss =
    std::function<void(const Operators& ops, const LossShape& shape)>;

// nn::Attention::Core. `shape`: of the heads and tokens that are here.
using AttentionCore =
    std::function<Traced(const Operators& ops, const Traced& q, const Traced& k,
                         const Traced& v, const HeadShape& shape)>;

// nn::ExpertDispatch: takes rows to the experts, runs these, and home.
// `experts`: of so many of those here.
using RunExperts = std::function<Traced(const Traced& rows, int64_t experts)>;
using ExpertDispatch = std::function<Traced(
    const Operators& ops, const Traced& rows, const RunExperts& run,
    const std::function<void()>& beside)>;

// nn::ExpertShard.
struct ExpertShard {
  ExpertDispatch dispatch = {};
  // Of so many numbers of the wide type.
  std::function<void(const Operators& ops, int64_t numel)> sum_samples = {};
  std::function<void(const Operators& ops, int64_t numel)> sum_batch = {};
  int64_t sample_parts = 1;
  // Until so many bytes are there.
  std::function<void(const Operators& ops, int64_t bytes)> gather_samples = {};
  Region region = {};
  // nn::TokenSplit.
  Ranks split = {};
  int64_t split_rank = 0;
};

struct TracedModel {
  // Of one rank, with micro-batches of so many samples of so many tokens.
  TracedModel(const ModelConfig& model, int64_t num_samples, int64_t seq_len);

  ModelConfig config;  // complete
  int64_t samples = 0;
  int64_t tokens = 0;        // of a sample, inside regions
  int64_t whole_tokens = 0;  // of a sample, on all ranks
  // Attention is of each sample's documents apart; one a sample costs most.
  bool documents = false;
  // Of prediction beyond the next token, in a step.
  int64_t depths = 0;
  // Its core keeps q, k and v alone: nn::CoreAgain.
  bool attention_again = false;
  int64_t heads = 0, kv_heads = 0;
  int64_t ffn = 0, vocab = 0;
  int64_t most_vocab = 0;               // on the rank of tp that has most of it
  int64_t experts = 0, expert_ffn = 0;  // that are here
  int64_t shared_ffn = 0;               // of all shared experts together

  // Layers with adapters, as "attention.q": in some blocks, and here taken to
  // be in all.
  std::set<std::string> adapted;
  nn::ProductType products = nn::ProductType::kSame;  // see set_products()

  // Seams: see models::Model.
  Region region;  // around attention, dense MLPs, and the vocabulary
  SummedLoss loss;
  AttentionCore attention;
  ExpertShard expert_shard;
  int64_t sequence_shards = 1;
  std::vector<int64_t> pieces = {0};

  // Of the states between blocks.
  int64_t hidden_tokens() const { return tokens / sequence_shards; }
  int64_t hidden_numel() const {
    return samples * hidden_tokens() * config.hidden;
  }
  // Of what the head takes, of all depths.
  int64_t head_numel() const {
    return (1 + depths) * samples * tokens * config.hidden;
  }
};

}  // namespace tessera::models::trace
