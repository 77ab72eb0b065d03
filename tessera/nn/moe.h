// Mixture of experts: every token goes to the k experts that a gate picks, and
// beside them to those that are shared.
//
//   y = sum over a token's experts of w_i expert_i(x), + shared(x)
//
// with e_i and w_i as router.h has them.
//
// Shapes:   x, y: (B, T, D); W, the gate's weight: (E, D), E experts; a row is
//           one (token, expert) pair, a rank has N = B T k of them.
// Types:    the gate's products, p and the balance in fp32 or wider.
// Choice:   of tokens; or of experts, each of which takes its C of a sample, so
//           that the load is even and some tokens get no expert, others many.
// Dropless: all experts take what comes; or with a capacity what is within it
//           in each sample: a choice beyond adds nothing to its token.
// Balance:  by a loss, E * sum over experts of f_e P_e, where f_e is the share
//           of tokens that chose e (these add up to k), P_e the mean of p_e
//           over them: k where the load is even, which is the least. The tokens
//           are those of a sample (kSample), which depends on no mesh; those of
//           a micro-batch of all ranks (kLayer); or those of all layers with
//           experts together (kBatch), as transformers has it. Or by a bias of
//           each expert, whose gradient is by how many tokens more than its
//           share it was chosen, in Eths of one: the optimizer steps against
//           its sign (optim's FlatSegment::sign_rate).
// Comm:     none; see ExpertShard.
// Empty:    an expert without a row runs on none: its gradient is zero.
// Source:   Jiang et al. 2024, arXiv 2401.04088 (the block); Fedus et al. 2022,
//           arXiv 2101.03961, eq. 4 (the auxiliary loss) and section 2.2 (the
//           capacity); Zoph et al. 2022, arXiv 2202.08906, eq. 5 (the z-loss);
//           Wang et al. 2024, arXiv 2408.15664 (the bias).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/nn/blocks.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/grouped_linear.h"
#include "tessera/nn/router.h"

namespace tessera::nn {

enum class BalanceOver { kSample, kLayer, kBatch };

// How evenly tokens went to experts. Sums over samples and layers, undefined
// before the first layer. With an ExpertShard: this rank's part of them.
struct Balance {
  // Of the balance loss, which a mean over a micro-batch counts once for each
  // of its samples.
  at::Tensor loss;
  // What training adds to its loss: aux_loss times that, and z_loss times the
  // mean over tokens of log(sum exp z_e)^2. Undefined where both weigh nothing.
  at::Tensor penalty;
  // (layers with experts, E + 2) fp64, of each layer: rows by expert; choices
  // that were dropped, or tokens that no expert chose; and the entropy of p, in
  // nats, summed over tokens.
  at::Tensor counts;
  // Of kBatch alone, until settle(): what shares by expert are multiplied with.
  at::Tensor pulls = {};  // (E)
  double weight = 0;      // of what comes of it, in the penalty
};

// Of kBatch: which tokens of a micro-batch chose what, in all layers. Forwards
// fill it in; it is whole when the last layer's has run.
struct BatchLoad {
  std::vector<at::Tensor> shares = {};  // f of each layer: (E)
};

// With the loads of all layers: `loss` and `penalty` of what kBatch left open.
// Does nothing elsewhere.
void settle(Balance& balance, const BatchLoad& load);

struct MoeOptions {
  RouterOptions router;
  MlpOptions expert;
  int64_t shared_width = 0;    // F of what is shared; 0: nothing is
  double capacity_factor = 0;  // 0: dropless
  bool has_bias = false, moves_bias = false;
  bool has_noise = false;
  BalanceOver balance = BalanceOver::kSample;
  double aux_loss = 0, z_loss = 0;
  int64_t layer = 0, layers = 1;  // which one this is, of those with experts
};

// As many MLPs without biases, stacked.
class Experts : public torch::nn::Module {
 public:
  Experts(int64_t experts, const MlpOptions& options);
  // rows: (N, D), those of the first expert that is here, then of the next;
  // what is behind them is for nobody, and nothing is given back of it.
  at::Tensor forward(const at::Tensor& rows, const RowGroups& groups) const;
  const std::shared_ptr<GroupedLinear>& gate() const { return gate_; }
  const std::shared_ptr<GroupedLinear>& up() const { return up_; }
  const std::shared_ptr<GroupedLinear>& down() const { return down_; }

 private:
  MlpKind kind_;
  std::shared_ptr<GroupedLinear> gate_;  // where the kind has one
  std::shared_ptr<GroupedLinear> up_;
  std::shared_ptr<GroupedLinear> down_;
};

// Takes rows (N, D), `counts` (E) of which go to each expert in turn, to where
// the experts are, runs these, and brings what they give back. Rows behind
// those go nowhere. Calls `beside`, if at all, while they travel.
using ExpertDispatch = std::function<at::Tensor(
    const at::Tensor& rows, const at::Tensor& counts, const Experts& experts,
    const std::function<void()>& beside)>;

// Ranks that hold the same tokens go on with a piece of each sample's: of T
// tokens, as mesh::chunk_of has them.
struct TokenSplit {
  int64_t ranks = 1, rank = 0;
  std::function<at::Tensor(const at::Tensor& x)> split = {};  // null: none
  // (B, piece, D) -> (B, tokens, D)
  std::function<at::Tensor(const at::Tensor& y, int64_t tokens)> join = {};
};

// What a rank does where experts, or their work, are shared out.
struct ExpertShard {
  ExpertDispatch dispatch = {};  // null: all experts are here
  // So many ranks have other tokens of the same samples, behind `split`, this
  // one as number `sample_part`. `sum_samples` adds up what they give it, in
  // place; `gather_samples` puts theirs (B, most of a rank's tokens, n) one
  // behind the other on dim 1.
  int64_t sample_parts = 1;
  int64_t sample_part = 0;
  std::function<void(const at::Tensor&)> sum_samples = {};
  std::function<at::Tensor(const at::Tensor&)> gather_samples = {};
  // Adds up what all ranks with other tokens of the micro-batch give it.
  std::function<void(const at::Tensor&)> sum_batch = {};
  // So many ranks route the same tokens, this one as number `copy`, and send
  // them all, to their parts of every expert: their outputs add up to y.
  int64_t copies = 1;
  int64_t copy = 0;
  Region region = {};  // before the gate; and y from the copies' parts of it
  TokenSplit split = {};
};

// What a mixture hears of its tokens.
struct MoeTokens {
  Positions positions = {};    // none: in generation, which drops nothing
  Balance* balance = nullptr;  // is added to; null: nobody asks
  BatchLoad* load = nullptr;   // of a training step
  const Draw* draw = nullptr;  // of such a step: what noise is drawn by
  // Of a sample's tokens on all ranks, those before what fills it up: they have
  // the capacity that they had alone. 0: all.
  int64_t unpadded = 0;
};

class Moe : public Block {
 public:
  explicit Moe(const MoeOptions& options);
  at::Tensor forward(const at::Tensor& x, const MoeTokens& of = {}) const;

  // Where in its sample a token is, decides what becomes of it.
  bool needs_positions() const {
    return options_.capacity_factor > 0 || options_.has_noise ||
           experts_choose();
  }

  void set_shard(ExpertShard shard) { shard_ = std::move(shard); }
  const ExpertShard& shard() const { return shard_; }
  const std::shared_ptr<Linear>& gate() const { return gate_; }
  const std::shared_ptr<Linear>& noise() const { return noise_; }  // or null
  const std::shared_ptr<Experts>& experts() const { return experts_; }
  const std::shared_ptr<Mlp>& shared() const { return shared_; }  // or null
  const at::Tensor& bias() const { return bias_; }  // or undefined

 private:
  bool experts_choose() const {
    return options_.router.choice == GateChoice::kExperts;
  }
  // The tokens that are routed here.
  struct Here {
    int64_t samples = 0;
    int64_t tokens = 0;  // of each, and on the rank that has most of them
    int64_t most = 0;
    int64_t of_sample = 0;   // on all ranks
    int64_t unpadded = 0;    // of these, before what fills it up
    bool in_samples = true;  // of known positions: not in generation
    Positions positions = {};
  };
  Here here(const at::Tensor& x, const MoeTokens& of) const;
  at::Tensor of_experts(const at::Tensor& x, const Here& here,
                        const MoeTokens& of,
                        const std::function<void()>& beside) const;
  at::Tensor products(const at::Tensor& tokens, const Linear& gate) const;
  at::Tensor noisy(const at::Tensor& products, const at::Tensor& tokens,
                   const Here& here, const Draw& draw) const;
  void count_load(Routing& routing) const;
  int64_t capacity(const Here& here) const;
  bool drops(const Here& here) const;
  // (B, T, n) of samples that are whole, in order -> of each as much.
  using Decision = std::function<at::Tensor(const at::Tensor& values)>;
  at::Tensor decide(const at::Tensor& values, const Here& here,
                    const Decision& decision) const;
  at::Tensor destinations(const at::Tensor& choices, const Here& here) const;
  at::Tensor takers(const at::Tensor& scores, const Here& here) const;
  int64_t most_rows(const Here& here) const;
  bool gives_most_rows(const Here& here) const;
  at::Tensor rows_by_sample(const Routing& routing, int64_t samples) const;
  void count_batch(BatchLoad& load, const Routing& routing) const;
  at::Tensor shares_of_batch(const Routing& routing) const;
  void add_balance(const MoeTokens& tokens, const Routing& routing,
                   const at::Tensor& products, const Here& here) const;
  at::Tensor balance_loss(const Routing& routing, const Here& here) const;
  // Of a token in the mean of its sample: of each copy, a part of it.
  double share_of_token(const Here& here) const {
    return 1.0 / static_cast<double>(here.of_sample * shard_.copies);
  }
  void add_counts(Balance& balance, const Routing& routing,
                  const at::Tensor& places) const;
  at::Tensor mix(const at::Tensor& tokens, const Here& here,
                 const Routing& routing, const at::Tensor& places,
                 const std::function<void()>& beside) const;

  MoeOptions options_;
  ExpertShard shard_;
  std::shared_ptr<Linear> gate_, noise_;
  std::shared_ptr<Experts> experts_;
  std::shared_ptr<Mlp> shared_;
  at::Tensor bias_;  // (E)
};

}  // namespace tessera::nn
