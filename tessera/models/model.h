// A model as strategies and the engine see it: units, parameters with roles,
// and seams, where a strategy puts in what ranks do together. None of them
// knows which model it is.
//
// Shapes: ids, targets: (B, T) of int64; hidden: (B, T, D); logits: (B, T, V).
//         T is at most ModelConfig::max_seq.
// Units:  what is run, gathered and recomputed as one: unit 0 embeds, the last
//         one has the final norm and the head, those between are blocks. Every
//         ParameterSpec says which of them compute with it. The head itself is
//         run with the loss, so that logits need never be whole.
// Ahead:  units of multi-token prediction, the last of the blocks, run in steps
//         alone. The k-th adds what the head takes of depth k behind its input,
//         which has k such (B, T, D) on dim 0; the last unit gives them all.
// Use:    construct; strategies set layouts by roles, and seams;
//         nn::materialise; then run, whole or unit by unit.
// Comm:   none of its own: what strategies put into the seams. Empty ones are
//         those of one rank.
// Threads: a model belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/models/model_config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/loss.h"
#include "tessera/nn/moe.h"

namespace tessera::models {

// The keys and values of every layer.
struct Cache {
  std::vector<nn::KvCache> layers;
  int64_t length() const { return layers.empty() ? 0 : layers[0].length; }
};

// The vocabulary's entries from `first` on are here: as many rows of the
// embedding, and logits.
struct VocabularyShard {
  int64_t first = 0;
  int64_t most = 0;        // on the rank that has most of them
  nn::Region region = {};  // before the head; and behind the embedding
  nn::SummedLoss loss = {};
};

// The tokens that the input of a unit is of.
struct Tokens {
  int64_t length = 0;               // T
  at::Tensor document_starts = {};  // see nn::Sight
  // Of a step; else nothing is dropped, and gates have no noise.
  std::optional<nn::Draw> draw = {};
  // Of a step's micro-batch: what its layers tell each other.
  std::shared_ptr<nn::BatchLoad> load = {};
  // (D, B, T) of a step with D units of multi-token prediction: of depth k, at
  // k - 1, the tokens k behind those of the input. Not defined: none of these
  // units has run.
  at::Tensor ahead = {};
  // Of a text that is being written: experts take whatever comes.
  bool drops_none = false;
  int64_t unpadded = 0;  // of each sample, see nn::MoeTokens
};

class Model : public torch::nn::Module {
 public:
  explicit Model(ModelConfig config);
  // Complete: without the zeros that stand for a default.
  const ModelConfig& config() const { return config_; }

  virtual int64_t num_units() const = 0;
  int64_t num_blocks() const { return num_units() - 2; }
  // Units of multi-token prediction, in front of the last one.
  int64_t num_ahead() const { return config_.mtp.layers; }
  bool is_ahead(int64_t unit) const {
    const int64_t last = num_units() - 1;
    return unit >= last - num_ahead() && unit < last;
  }
  // Units that own parameters: those that run, and behind them one for the
  // experts of each block, which go apart from the block that runs them.
  int64_t num_owners() const { return num_units() + num_blocks(); }
  // The unit that gathers and reduces a parameter.
  int64_t owner_of(const nn::ParameterSpec& spec) const;
  // ids or hidden -> hidden; of the last unit, what the head takes, of all T.
  // Adds what experts tell of their balance to `balance`, unless it is null: of
  // one that asks for all layers, nn::settle() it when all have run.
  // With `again` a block's attention is as nn::Attention::forward says.
  virtual at::Tensor forward_unit(int64_t unit, const at::Tensor& x,
                                  const Tokens& tokens,
                                  nn::Balance* balance = nullptr,
                                  nn::CoreAgain* again = nullptr) = 0;
  // The head, and its loss: of what the last unit gave. See nn::head_loss() for
  // what a `scale` does to `hidden` and to the head's gradient.
  at::Tensor logits_of(const at::Tensor& hidden) const;
  nn::LossSum loss_of(at::Tensor hidden, const at::Tensor& targets,
                      std::optional<double> scale = {}) const;

  // All units but those ahead: (B, T) -> logits (B, T, V), and the sum of their
  // cross-entropy over the targets.
  at::Tensor forward(const at::Tensor& ids, nn::Balance* balance = nullptr);
  nn::LossSum loss(const at::Tensor& ids, const at::Tensor& targets,
                   nn::Balance* balance = nullptr);

  // The tokens that follow those in the cache -> logits of the last (B, V).
  at::Tensor forward_cached(const at::Tensor& ids, Cache& cache);
  // One unit of it, without gradients: ids or hidden, the tokens from `begin`
  // on -> hidden or logits (B, V).
  virtual at::Tensor forward_unit_cached(int64_t unit, const at::Tensor& x,
                                         int64_t begin, Cache& cache) = 0;
  // An empty cache with room for `capacity` tokens.
  Cache make_cache(int64_t capacity) const;

  // Seams. Around attention, and around dense MLPs: ranks compute parts of
  // their sums.
  virtual void set_region(const nn::Region& region) = 0;
  virtual void set_vocabulary(const VocabularyShard& shard) = 0;
  // How tokens see each other.
  virtual void set_attention(const nn::Attention::Core& core) = 0;
  virtual void set_experts(const nn::ExpertShard& shard) = 0;
  // Hidden states between blocks are part `rank` of `size` of the sequence.
  void set_sequence_shard(int64_t rank, int64_t size);
  int64_t sequence_shards() const { return sequence_size_; }
  // The tokens are equal pieces of a longer sequence, these of them.
  void set_pieces(std::vector<int64_t> pieces);

 protected:
  // The parameters below `module` are computed with in these units.
  static void assign(torch::nn::Module& module,
                     const std::vector<int64_t>& units);
  // The runs of positions of T tokens from `begin` on, as (begin, length).
  nn::Positions runs_of(int64_t begin, int64_t tokens) const;
  // Those of them that are here between blocks, T / sequence_shards().
  nn::Positions runs_here(int64_t begin, int64_t tokens) const;
  // (V, D), as it is at the time.
  virtual at::Tensor head_weight() const = 0;
  void set_loss(nn::SummedLoss loss, int64_t most_columns) {
    loss_ = std::move(loss);
    most_columns_ = most_columns;
  }

 private:
  at::Tensor forward_units(const at::Tensor& ids, nn::Balance* balance);

  ModelConfig config_;
  nn::SummedLoss loss_;
  int64_t most_columns_ = 0;  // 0: all of the vocabulary
  int64_t sequence_rank_ = 0, sequence_size_ = 1;
  std::vector<int64_t> pieces_ = {0};
};

// The model of a configuration.
std::shared_ptr<Model> make_model(const ModelConfig& config);

// Elements of all parameters, a tied one once; and of those that one token goes
// through: of experts the top_k that it is sent to, or where these choose as
// many as take it on average.
struct ParameterCount {
  int64_t all = 0, active = 0;
};
ParameterCount count_parameters(const ModelConfig& config);
inline int64_t num_parameters(const ModelConfig& config) {
  return count_parameters(config).all;
}
// "mixtral, 46.7B parameters, 12.9B of them active"; of dense families without
// the last.
std::string describe(const ModelConfig& config);

// Floating-point operations of forward and backward for one token of a sequence
// of seq_len, as MFU counts them (Chowdhery et al., PaLM, arXiv 2204.02311,
// appendix B): 6 a weight that multiplies, the head's for each depth, embedding
// look-ups not, of experts the top_k that a token goes to, and for attention
// 6 * layers * heads * (width of keys + width of values) * seq_len, or where it
// is less a layer's window, of one document a sample.
int64_t flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace tessera::models
