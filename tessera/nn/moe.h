// Mixture of experts: every token goes to the k experts that a gate picks, all
// of them take what comes (dropless).
//
//   p = softmax(x W^T),   y = sum over the k largest p_e of
//                             p_e / (sum of these k) * expert_e(x)
//
// Shapes:  x, y: (B, T, D); W, the gate's weight: (E, D), E experts; a row is
//          one (token, expert) pair, a rank has N = B T k of them.
// Types:   p and the balance in fp32 or wider.
// Comm:    none; see ExpertShard.
// Empty:   an expert without a row runs on none: its gradient is zero.
// Source:  Jiang et al. 2024, arXiv 2401.04088 (the block); Fedus et al. 2022,
//          arXiv 2101.03961, eq. 4 (the auxiliary loss).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

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

// y = x W_e^T for the rows x of each expert e in turn, `splits[e]` of them.
// W: (E, out, in), of the experts that are here.
class GroupedLinear : public Block {
 public:
  GroupedLinear(int64_t experts, const LinearOptions& options);
  at::Tensor forward(const at::Tensor& rows,
                     const std::vector<int64_t>& splits) const;
  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};

// As many MLPs without biases, stacked.
class Experts : public torch::nn::Module {
 public:
  Experts(int64_t experts, const MlpOptions& options);
  // rows: (N, D), those of the first expert that is here, then of the next.
  at::Tensor forward(const at::Tensor& rows,
                     const std::vector<int64_t>& splits) const;
  const std::shared_ptr<GroupedLinear>& gate() const { return gate_; }
  const std::shared_ptr<GroupedLinear>& up() const { return up_; }
  const std::shared_ptr<GroupedLinear>& down() const { return down_; }

 private:
  MlpKind kind_;
  std::shared_ptr<GroupedLinear> gate_;  // of kSwiGlu
  std::shared_ptr<GroupedLinear> up_;
  std::shared_ptr<GroupedLinear> down_;
};

// Takes rows (N, D), `counts` (E) of which go to each expert in turn, to where
// the experts are, runs these, and brings what they give back.
using ExpertDispatch = std::function<at::Tensor(
    const at::Tensor& rows, const at::Tensor& counts, const Experts& experts)>;

// What a rank does where experts, or their work, are shared out.
struct ExpertShard {
  ExpertDispatch dispatch = {};  // null: all experts are here
  // So many ranks have other tokens of the same samples, this one included, and
  // `sum_samples` adds up what they give it, in place.
  int64_t sample_parts = 1;
  std::function<void(const at::Tensor&)> sum_samples = {};
  // So many ranks route the same tokens, this one as number `copy`.
  int64_t copies = 1;
  int64_t copy = 0;
  // Of these, each sends a share of the tokens; else each sends them all, to
  // its part of every expert. Either way the copies' outputs add up to y.
  bool shares_tokens = false;
  Region region = {};  // before the gate; and y from the copies' parts of it
};

class Moe : public Block {
 public:
  explicit Moe(const MoeOptions& options);
  // Adds to `balance` unless it is null.
  at::Tensor forward(const at::Tensor& x, Balance* balance = nullptr) const;

  void set_shard(ExpertShard shard) { shard_ = std::move(shard); }
  const std::shared_ptr<Linear>& gate() const { return gate_; }
  const std::shared_ptr<Experts>& experts() const { return experts_; }

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

  int64_t num_experts_;  // in all
  int64_t top_k_;
  ExpertShard shard_;
  std::shared_ptr<Linear> gate_;
  std::shared_ptr<Experts> experts_;
};

}  // namespace tessera::nn
