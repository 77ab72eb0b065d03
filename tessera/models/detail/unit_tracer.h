// The units of a decoder on a tape, in the order and with the variables of
// models/decoder.cpp, nn/ and the strategies' folders, whose memory is theirs.
//
// Routing: as many rows for every expert; what a batch's tokens really choose
//          is not known here.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/models/detail/operators.h"
#include "tessera/models/family.h"

namespace tessera::models::detail {

// A decoder as one rank runs it.
struct LocalDecoder {
  const Family* family = nullptr;
  int64_t samples = 0;
  int64_t tokens = 0;  // of a sample, inside the regions of tensor parallelism
  int64_t width = 0;   // D
  int64_t heads = 0, kv_heads = 0, head_width = 0;
  int64_t ffn = 0, expert_ffn = 0, vocab = 0;
  int64_t positions = 0;  // of a table that is learned; else rotary
  int64_t experts = 0, top_k = 0;

  Ranks tp, cp, ep;
  int64_t cp_coord = 0, tp_coord = 0;
  bool sequence_parallel = false;
  std::string context_method;
  // Of experts: over `samples_of` their balance is summed; `copies` ranks route
  // the same tokens, and share them out or send them all.
  Ranks samples_of;
  int64_t copies = 1;
  bool shares_tokens = false, expert_region = false;

  // Of the states between blocks.
  int64_t hidden_tokens() const {
    return sequence_parallel ? tokens / tp.size : tokens;
  }
  int64_t hidden_numel() const { return samples * hidden_tokens() * width; }
  int64_t logits_numel() const { return samples * tokens * vocab; }
};

class UnitTracer {
 public:
  UnitTracer(const Operators& ops, const LocalDecoder& local)
      : ops_(ops), local_(local) {}

  Traced embed() const;
  Traced block(const Traced& x, bool has_experts);
  Traced head(const Traced& x) const;
  // Of the auxiliary loss, after a block with experts that records.
  const Traced& balance() const { return balance_; }
  // The logits' gradient takes their place.
  void loss() const;

 private:
  Memory bytes(int64_t count) const { return ops_.tape().allocate(count); }
  Memory numbers(int64_t count) const { return bytes(8 * count); }
  Traced enter(const Traced& x) const;
  Traced leave(const Traced& x) const;
  Traced norm(const Traced& x) const;
  // A layer whose inputs are cut over tp, and its sum.
  Traced rows(const Traced& x, int64_t in, int64_t out, bool bias) const;
  Traced mlp(const Traced& input) const;
  using Layer = std::function<Traced(const Traced& x, int64_t in, int64_t out)>;
  Traced feed_forward(const Traced& x, int64_t ffn, const Layer& in,
                      const Layer& out) const;

  // In attention_tracer.cpp.
  Traced attention(const Traced& input) const;
  // Over all heads of q or k: so many features are here.
  Traced norm_of_heads(const Traced& x, int64_t width) const;
  Memory mean_over_tp(int64_t rows) const;
  Memory rotation() const;
  HeadShape heads_here() const;
  Traced core(const Traced& q, const Traced& k, const Traced& v) const;
  Traced ring(const Traced& q, const Traced& k, const Traced& v) const;
  Traced gathered(const Traced& q, const Traced& k, const Traced& v) const;
  Traced ulysses(const Traced& q, const Traced& k, const Traced& v) const;
  Traced to_heads(const Traced& x) const;
  Traced to_tokens(const Traced& x) const;

  // In moe_tracer.cpp.
  struct Routing {
    Traced probabilities;
    Memory experts;
    Traced weights;
  };
  Traced moe(const Traced& input);
  Routing route(const Traced& tokens) const;
  void add_balance(const Routing& routing);
  Traced mix(const Traced& tokens, const Routing& routing) const;
  Traced dispatch(const Traced& rows) const;
  Traced run_experts(const Traced& rows) const;

  const Operators& ops_;
  const LocalDecoder& local_;
  Memory rotation_;  // of the block that runs
  Traced balance_;
  Memory load_;
};

}  // namespace tessera::models::detail
