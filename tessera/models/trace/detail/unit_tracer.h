// The units of a decoder on a tape, in the order and with the variables of
// models/decoder.cpp and nn/, whose memory is theirs.
//
// Routing: as many rows for every expert; what a batch's tokens really choose
//          is not known here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/models/family.h"
#include "tessera/models/trace/traced_model.h"

namespace tessera::models::trace::detail {

class UnitTracer {
 public:
  UnitTracer(const Operators& ops, const TracedModel& model)
      : ops_(ops),
        model_(model),
        config_(model.config),
        family_(family_named(model.config.family)) {}

  Traced embed() const;
  Traced block(const Traced& x, int64_t layer);
  // Of a depth, from 1, of multi-token prediction.
  Traced predict_ahead(const Traced& x, int64_t depth);
  // What the head takes.
  Traced before_head(const Traced& x) const;
  // Of the auxiliary loss, after a block with experts that records.
  const Traced& balance() const { return balance_; }
  // Of a block whose core keeps q, k and v alone; does nothing elsewhere.
  void compute_core_again() const;
  // With the head; where the tape records, with the backward of both.
  void loss() const;

 private:
  Traced enter(const Region& region, const Traced& x) const {
    return region.enter ? region.enter(ops_, x) : x;
  }
  Traced leave(const Region& region, const Traced& x) const {
    return region.leave ? region.leave(ops_, x) : x;
  }
  Traced norm(const Traced& x) const;
  // A linear layer, with its adapter where it has one.
  Traced linear(const std::string& layer, const Traced& x, int64_t in,
                int64_t out, bool bias) const;
  // Layers of one input, without an adapter all at once.
  struct NamedLayer {
    std::string name;
    int64_t out;
  };
  std::vector<Traced> linears(const std::vector<NamedLayer>& layers,
                              const Traced& x, int64_t in, bool bias) const;
  // A layer of which ranks have parts of the sum.
  Traced rows(const std::string& layer, const Traced& x, int64_t in,
              int64_t out, bool bias) const;
  // `name`: as "mlp", of linear layers with adapters; `ffn`: its width here.
  Traced mlp(const Traced& input, const std::string& name, int64_t ffn) const;
  // Learned positions.
  Traced add_places(const Traced& x) const;
  // nn::add_kept where y is, and of a view, which it leaves; x may be nothing.
  Traced add_kept(const Traced& x, const Traced& y, bool of_view) const;
  // Some samples of x, where they are; and x with y behind it.
  Traced samples_of(const Traced& x, int64_t numel) const;
  Traced joined(const Traced& x, const Traced& y) const;
  Traced put_behind(const Traced& x, const Traced& y) const;
  Traced enter_ahead(const Traced& x, int64_t depth) const;
  void loss_of_depth(int64_t depth) const;
  void cross_entropy(int64_t rows) const;

  // In attention_tracer.cpp.
  Traced attention(const Traced& input) const;
  struct Heads {
    Traced q, k, v;
  };
  Heads grouped_heads(const Traced& x) const;
  Heads latent_heads(const Traced& x) const;
  Traced part_of(const Traced& x, int64_t numel) const;
  // Over all heads of q or k: so many features are here.
  Traced norm_of_heads(const Traced& x, int64_t width) const;
  // Of one number of each row, over the ranks of the region.
  Memory mean_over_ranks(int64_t rows) const;
  Memory rotation() const;
  HeadShape heads_here() const;
  Traced core(const Traced& q, const Traced& k, const Traced& v) const;
  Traced kept_core(const Traced& q, const Traced& k, const Traced& v) const;

  // In moe_tracer.cpp.
  struct Routing {
    Traced products;  // kept for the z-loss, where there is one
    Traced probabilities;
    Memory experts;
    Traced weights;
    Memory kept;  // within the capacity
  };
  Traced moe(const Traced& input);
  Traced gate(const Traced& tokens) const;
  Traced noisy(const Traced& products, const Traced& tokens) const;
  Routing route(const Traced& tokens) const;
  // Of rows of k numbers, each over its row's sum.
  Traced over_sum(const Traced& x, int64_t rows, int64_t k) const;
  TokenPiece piece_of_tokens(const Traced& x) const;
  void keep_choices(Routing& routing, const TokenPiece& piece) const;
  int64_t capacity() const;
  struct Rows {
    int64_t room, sent;
  };
  Rows rows_of(int64_t tokens) const;
  void count_load(Routing& routing) const;
  void add_balance(const Routing& routing);
  Traced mix(const Traced& tokens, const Routing& routing,
             const std::function<void()>& beside) const;
  Traced run_experts(const Traced& rows, int64_t experts) const;

  const Operators& ops_;
  const TracedModel& model_;
  const ModelConfig& config_;
  const Family& family_;
  // Of the block that runs.
  Memory rotation_;
  int64_t window_ = 0;
  Traced balance_;
  Memory load_;
  struct CoreAgain {
    Traced q, k, v, y;
  };
  mutable std::shared_ptr<CoreAgain> again_;
};

}  // namespace tessera::models::trace::detail
