// Mixture of experts: every token goes to the k experts that a gate picks, all
// of them take what comes (dropless).
//
//   p = softmax(x W^T),   y = sum over the k largest p_e of
//                             p_e / (sum of these k) * expert_e(x)
//
// Shapes:  x, y: (B, T, D); W, the gate's weight: (E, D), E experts; a row is
//          one (token, expert) pair, a rank has N = B T k of them.
// Types:   p and the balance in fp32 or wider.
// Comm:    none, or what ExpertShard says: over `exchange` an all_gather of E
//          counts, and an all_to_all of rows each way, again in backward;
//          over `samples`, where a Balance is asked for, an all_reduce of
//          (B, E).
// Empty:   an expert without a row runs on none: its gradient is zero, and
//          every rank's collectives are the same.
// Source:  Jiang et al. 2024, arXiv 2401.04088 (the block); Fedus et al. 2022,
//          arXiv 2101.03961, eq. 4 (the auxiliary loss).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/nn/blocks.h"

namespace tessera::nn {

// How evenly tokens went to experts.
struct Balance {
  // Added up over samples and layers: E * sum over experts of f_e P_e, where
  // f_e is the share of the sample's tokens that went to e (these add up to k),
  // P_e the mean of p_e over them. k where the load is even, which is the
  // least. Of one sample it does not depend on micro-batches or the mesh. With
  // an ExpertShard: this rank's part of it. Undefined before the first layer.
  at::Tensor loss;
  at::Tensor load;  // (E) fp64: this rank's rows by expert
};

struct MoeOptions {
  int64_t experts = 8;
  int64_t top_k = 2;
  MlpOptions expert;
};

// What a rank does where experts, or their work, are shared out.
struct ExpertShard {
  // Rank r of it has experts [r E/n, (r+1) E/n). Null: all experts are here.
  comm::Group* exchange = nullptr;
  // Ranks that have other tokens of the same samples, this one included.
  comm::Group* samples = nullptr;
  // So many ranks route the same tokens, this one as number `copy`.
  int64_t copies = 1;
  int64_t copy = 0;
  // Of these, each sends a share of the tokens; else each sends them all, to
  // its part of every expert. Either way the copies' outputs add up to y.
  bool shares_tokens = false;
  Region region;  // before the gate; and y from the copies' parts of it
};

class Moe : public Block {
 public:
  explicit Moe(const MoeOptions& options);
  // Adds to `balance` unless it is null.
  at::Tensor forward(const at::Tensor& x, Balance* balance = nullptr) const;

  void set_shard(ExpertShard shard) { shard_ = std::move(shard); }
  const std::shared_ptr<Linear>& gate() const { return gate_; }
  const std::vector<std::shared_ptr<Mlp>>& experts() const { return experts_; }

 private:
  // Of every token: its probabilities (N, E), and of its experts (N, k) the
  // numbers and the weights.
  struct Routing {
    at::Tensor probabilities, experts, weights;
  };
  Routing route(const at::Tensor& tokens) const;
  void add_balance(Balance& balance, const Routing& routing,
                   int64_t samples) const;
  at::Tensor mix(const at::Tensor& tokens, const Routing& routing) const;
  at::Tensor run_local(const at::Tensor& rows, const at::Tensor& counts) const;

  int64_t top_k_;
  ExpertShard shard_;
  std::shared_ptr<Linear> gate_;
  std::vector<std::shared_ptr<Mlp>> experts_;
};

}  // namespace tessera::nn
