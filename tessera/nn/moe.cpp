#include "tessera/nn/moe.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "tessera/mesh/layout.h"
#include "tessera/nn/expert_rows.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// z = x W^T of a type that is too narrow for it.
class WideProduct : public torch::autograd::Function<WideProduct> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return at::mm(x.to(at::kFloat), weight.to(at::kFloat).t());
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], weight = saved[1];
    const at::Tensor d_x =
        at::mm(gradients[0], weight.to(at::kFloat)).to(x.scalar_type());
    if (!weight.requires_grad()) return {d_x, {}};
    return {
        d_x,
        at::mm(gradients[0].t(), x.to(at::kFloat)).to(weight.scalar_type())};
  }
};

// Hands weights on; the bias gets `excess` for a gradient, whatever theirs is.
class CountLoad : public torch::autograd::Function<CountLoad> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weights,
                            const at::Tensor& /*bias*/,
                            const at::Tensor& excess) {
    ctx->saved_data["excess"] = excess;
    return weights.view_as(weights);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    return {gradients[0], ctx->saved_data["excess"].toTensor(), {}};
  }
};

void add_to(at::Tensor& sum, const at::Tensor& more) {
  sum = sum.defined() ? sum + more : more;
}

}  // namespace

void settle(Balance& balance, const BatchLoad& load) {
  if (!balance.pulls.defined()) return;
  std::vector<at::Tensor> ran;  // units ahead may not have
  std::ranges::copy_if(load.shares, std::back_inserter(ran),
                       [](const at::Tensor& each) { return each.defined(); });
  const at::Tensor shares = at::stack(ran).mean(0);
  const at::Tensor loss = (shares * std::exchange(balance.pulls, {})).sum();
  add_to(balance.loss, loss.detach());
  if (balance.weight > 0) add_to(balance.penalty, loss * balance.weight);
}

Experts::Experts(int64_t experts, const MlpOptions& options)
    : kind_(options.kind) {
  const auto linear = [&](const LinearOptions& each) {
    return std::make_shared<GroupedLinear>(experts, each);
  };
  const LinearOptions in{options.width, options.hidden, /*bias=*/false,
                         options.init_std, Role::column()};
  if (has_gate(kind_)) gate_ = register_module("gate", linear(in));
  up_ = register_module("up", linear(in));
  down_ = register_module("down",
                          linear({options.hidden, options.width, /*bias=*/false,
                                  options.out_init_std, Role::row()}));
}

at::Tensor Experts::forward(const at::Tensor& given,
                            const RowGroups& groups) const {
  const int64_t count = groups.rows();
  const at::Tensor rows =
      count == given.size(0) ? given : given.narrow(0, 0, count);
  const at::Tensor up = up_->forward(rows, groups);
  const at::Tensor gate = gate_ ? gate_->forward(rows, groups) : at::Tensor();
  return down_->forward(activated(kind_, gate, up), groups);
}

Moe::Moe(const MoeOptions& options) : options_(options) {
  const int64_t experts = options.router.experts;
  gate_ = register_module(
      "gate", std::make_shared<Linear>(LinearOptions{
                  options.expert.width, experts,
                  /*bias=*/false, options.expert.init_std, Role::router()}));
  if (options.has_noise) {
    // From zeros, as in the paper: the same for every token at first.
    noise_ =
        register_module("noise", std::make_shared<Linear>(LinearOptions{
                                     options.expert.width, experts,
                                     /*bias=*/false, 0.0, Role::router()}));
  }
  if (options.has_bias) {
    bias_ = declare_parameter("score_bias", {experts}, Init::zeros(),
                              Role::router());
    spec("score_bias")->balances_load = true;
    spec("score_bias")->is_frozen = !options.moves_bias;
  }
  experts_ = register_module(
      "experts", std::make_shared<Experts>(experts, options.expert));
  if (options.shared_width == 0) return;
  MlpOptions shared = options.expert;
  shared.hidden = options.shared_width;
  shared_ = register_module("shared", std::make_shared<Mlp>(shared));
}

at::Tensor Moe::forward(const at::Tensor& input, const MoeTokens& of) const {
  const Region& region = shard_.region;
  const TokenSplit& split = shard_.split;
  at::Tensor x = region.enter ? region.enter(input) : input;
  // A step of generation has a token of each sample: nobody asks of which.
  const bool counts = of.balance || of.load || !of.positions.empty();
  if (split.split && x.size(1) == 1 && !counts) {
    x = x.reshape({1, -1, x.size(2)});
  }
  const Here here = this->here(x, of);
  const int64_t whole = x.size(1);
  if (split.split) x = split.split(x);
  at::Tensor shared;
  const auto run_shared = [&] {
    if (shared_ && !shared.defined()) shared = shared_->forward(input);
  };
  at::Tensor y = of_experts(x, here, of, run_shared);
  if (split.join) y = split.join(y, whole).reshape(input.sizes());
  if (region.leave) y = region.leave(y);
  run_shared();
  return shared_ ? y + shared : y;
}

// This rank's part of y, of the tokens that it routes.
at::Tensor Moe::of_experts(const at::Tensor& x, const Here& here,
                           const MoeTokens& of,
                           const std::function<void()>& beside) const {
  const at::Tensor tokens = x.reshape({-1, x.size(2)});
  at::Tensor z = products(tokens, *gate_);
  if (noise_ && of.draw) z = noisy(z, tokens, here, *of.draw);
  Routing routing = route(z, bias_, options_.router);
  const auto by_sample = [&](const at::Tensor& t) {
    return t.view({here.samples, here.tokens, t.size(1)});
  };
  if (experts_choose()) {
    routing.experts = takers(by_sample(routing.weights.detach()), here);
  }
  const at::Tensor places = destinations(by_sample(routing.experts), here);
  if (of.load) count_batch(*of.load, routing);
  if (of.balance) {
    add_counts(*of.balance, routing, places);
    add_balance(of, routing, z, here);
  }
  z.reset();  // nobody needs it while experts run
  count_load(routing);
  return mix(tokens, here, routing, places, beside).view(x.sizes());
}

// Of x (B, T, D), before tokens are split.
Moe::Here Moe::here(const at::Tensor& x, const MoeTokens& of) const {
  const TokenSplit& split = shard_.split;
  const int64_t tokens = x.size(1);
  const mesh::Range piece = mesh::chunk_of(tokens, split.ranks, split.rank);
  const int64_t of_sample = tokens * (shard_.sample_parts / split.ranks);
  return {.samples = x.size(0),
          .tokens = piece.size(),
          .most = mesh::chunk_of(tokens, split.ranks, 0).size(),
          .of_sample = of_sample,
          .unpadded = of.unpadded > 0 ? of.unpadded : of_sample,
          .in_samples = !of.positions.empty(),
          .positions = part_of(of.positions, piece.begin, piece.size())};
}

at::Tensor Moe::products(const at::Tensor& tokens, const Linear& gate) const {
  if (tokens.scalar_type() == wide_type(tokens)) return gate.forward(tokens);
  return WideProduct::apply(tokens, gate.weight());
}

at::Tensor Moe::noisy(const at::Tensor& products, const at::Tensor& tokens,
                      const Here& here, const Draw& draw) const {
  const at::Tensor normal =
      gate_noise(draw, options_.layer, here.positions, here.samples,
                 options_.router.experts, products.options());
  return products + normal * at::softplus(this->products(tokens, *noise_));
}

// Of what tokens chose, be it dropped: that is what the bias moves.
void Moe::count_load(Routing& routing) const {
  if (!bias_.defined() || !bias_.requires_grad()) return;
  const int64_t experts = options_.router.experts;
  at::Tensor excess =
      at::zeros({experts}, bias_.options().requires_grad(false));
  if (shard_.copy == 0) {  // the others route the same tokens
    // In whole numbers, whose sums over ranks are exact: rounding moves no
    // expert that has just its share.
    excess =
        counts_of(routing.experts, experts) * experts - routing.experts.numel();
    excess = excess.to(bias_.scalar_type());  // wide: ParameterSpec::type_in()
  }
  routing.weights = CountLoad::apply(routing.weights, bias_, excess);
}

// Tokens of a sample that an expert takes at most.
int64_t Moe::capacity(const Here& here) const {
  const RouterOptions& router = options_.router;
  return room_of(options_.capacity_factor, here.unpadded, router.top_k,
                 router.experts);
}

// Of whole samples, wherever their tokens are; gives back what is of those
// here, zeros of what fills samples up.
at::Tensor Moe::decide(const at::Tensor& values, const Here& here,
                       const Decision& decision) const {
  const int64_t n = values.size(2);
  const at::Tensor places = each_of(here.positions, values.options())
                                .view({1, -1, 1})
                                .expand({here.samples, -1, 1});
  at::Tensor placed = at::cat({values, places}, /*dim=*/2);
  if (here.tokens < here.most) {  // what is padded is behind all tokens
    placed = at::constant_pad_nd(placed, {0, 0, 0, here.most - here.tokens},
                                 std::numeric_limits<int32_t>::max());
  }
  const at::Tensor all =
      shard_.gather_samples ? shard_.gather_samples(placed) : placed;
  const at::Tensor order =
      all.select(0, 0).select(1, n).argsort().narrow(0, 0, here.unpadded);
  const at::Tensor decided =
      decision(all.narrow(2, 0, n).index_select(1, order));
  return at::zeros({here.samples, all.size(1), n}, decided.options())
      .index_copy_(1, order, decided)
      .narrow(1, shard_.sample_part * here.most, here.tokens);
}

bool Moe::drops(const Here& here) const {
  return options_.capacity_factor > 0 && here.in_samples && !experts_choose();
}

// (B T, k): the experts that choices (B, T, k) get to; E of what is dropped.
at::Tensor Moe::destinations(const at::Tensor& choices,
                             const Here& here) const {
  const RouterOptions& router = options_.router;
  if (!drops(here)) return choices.view({-1, choices.size(2)});
  const at::Tensor kept = decide(choices, here, [&](const at::Tensor& sorted) {
    return within_capacity(sorted, router.experts, capacity(here));
  });
  return at::where(kept, choices, router.experts).view({-1, router.top_k});
}

// (B T, E): e where expert e takes the token, E where it does not, by scores
// (B, T, E).
at::Tensor Moe::takers(const at::Tensor& scores, const Here& here) const {
  TORCH_INTERNAL_ASSERT(here.in_samples, "experts choose of whole samples");
  const int64_t experts = options_.router.experts;
  const at::Tensor taken = decide(scores, here, [&](const at::Tensor& sorted) {
    return taken_tokens(sorted, capacity(here));
  });
  const at::Tensor numbers =
      at::arange(experts, scores.options().dtype(at::kLong));
  return at::where(taken, numbers, experts).view({-1, experts});
}

// That the tokens here give.
int64_t Moe::most_rows(const Here& here) const {
  const RouterOptions& router = options_.router;
  if (!experts_choose()) return here.samples * here.tokens * router.top_k;
  return router.experts * here.samples * std::min(here.tokens, capacity(here));
}

// Whether they give as many whatever is chosen; else the host has to read from
// the routing how many.
bool Moe::gives_most_rows(const Here& here) const {
  return experts_choose() ? here.tokens == here.of_sample : !drops(here);
}

// (samples, E): by how many tokens that are here each expert was chosen.
at::Tensor Moe::rows_by_sample(const Routing& routing, int64_t samples) const {
  const int64_t experts = options_.router.experts;
  const at::Tensor& p = routing.probabilities;
  const at::Tensor chosen = routing.experts.view({samples, -1});
  return at::zeros({samples, experts + 1}, p.options().requires_grad(false))
      .scatter_add_(1, chosen, at::ones({1}, p.options()).expand_as(chosen))
      .narrow(1, 0, experts)
      .contiguous();
}

// (E): of the tokens of the micro-batch of all ranks, the shares that chose.
at::Tensor Moe::shares_of_batch(const Routing& routing) const {
  const at::Tensor rows = rows_by_sample(routing, 1).view({-1});
  if (shard_.sum_batch) shard_.sum_batch(rows);
  return rows * (static_cast<double>(options_.router.top_k) / rows.sum());
}

// Once, though a unit may run again.
void Moe::count_batch(BatchLoad& load, const Routing& routing) const {
  if (options_.balance != BalanceOver::kBatch) return;
  load.shares.resize(options_.layers);
  at::Tensor& mine = load.shares.at(options_.layer);
  if (!mine.defined()) mine = shares_of_batch(routing);
}

// This rank's part, summed over samples: a mean over a micro-batch counts for
// each of them.
at::Tensor Moe::balance_loss(const Routing& routing, const Here& here) const {
  const auto experts = static_cast<double>(options_.router.experts);
  const at::Tensor& p = routing.probabilities;
  const double share = share_of_token(here);
  if (options_.balance == BalanceOver::kLayer) {
    return (shares_of_batch(routing) * p.sum(0)).sum() * (experts * share);
  }
  const at::Tensor rows = rows_by_sample(routing, here.samples);
  if (shard_.sum_samples) shard_.sum_samples(rows);
  return (rows * p.view({here.samples, here.tokens, p.size(1)}).sum(1)).sum() *
         (experts * share * share * static_cast<double>(shard_.copies));
}

void Moe::add_balance(const MoeTokens& tokens, const Routing& routing,
                      const at::Tensor& products, const Here& here) const {
  Balance& balance = *tokens.balance;
  const at::Tensor& p = routing.probabilities;
  const double share = share_of_token(here);
  // Where experts choose the load is even: it pulls at nothing.
  const double weight = experts_choose() ? 0 : options_.aux_loss;
  if (options_.balance == BalanceOver::kBatch) {
    TORCH_INTERNAL_ASSERT(tokens.load, "a balance over batches has their load");
    const double scale = share * static_cast<double>(options_.router.experts);
    const at::Tensor of = weight > 0 ? p : p.detach();
    add_to(balance.pulls, of.sum(0) * scale);
    balance.weight = weight;
  } else {
    const at::Tensor loss = balance_loss(routing, here);
    add_to(balance.loss, loss.detach());
    if (weight > 0) add_to(balance.penalty, loss * weight);
  }
  if (options_.z_loss == 0) return;
  const at::Tensor z = products.to(p.scalar_type()).logsumexp(-1);
  add_to(balance.penalty, z.square().sum() * (options_.z_loss * share));
}

void Moe::add_counts(Balance& balance, const Routing& routing,
                     const at::Tensor& places) const {
  const int64_t experts = options_.router.experts;
  const at::NoGradGuard no_grad;
  // By expert, and behind them what is dropped.
  const at::Tensor rows = counts_of(places, experts + 1);
  if (experts_choose()) {  // no choice is dropped, but a token may be
    rows.narrow(0, experts, 1).copy_((places == experts).all(1).sum());
  }
  const at::Tensor& p = routing.probabilities;
  const at::Tensor entropy = -at::xlogy(p, p).sum().view({1});
  const at::Tensor counts =
      at::cat({rows.to(at::kDouble), entropy.to(at::kDouble)}) / shard_.copies;
  if (!balance.counts.defined()) {
    balance.counts =
        at::zeros({options_.layers, experts + 2}, counts.options());
  }
  balance.counts.select(0, options_.layer).add_(counts);
}

// Of tokens (N, D).
at::Tensor Moe::mix(const at::Tensor& tokens, const Here& here,
                    const Routing& routing, const at::Tensor& places,
                    const std::function<void()>& beside) const {
  const int64_t experts = options_.router.experts;
  // What is dropped is behind all others.
  const int64_t most = most_rows(here);
  const RowOrder order = order_of_rows(places, most);
  at::Tensor rows = rows_of_tokens(tokens, order);
  const at::Tensor counts =
      counts_of(places, experts + 1).narrow(0, 0, experts);
  std::optional<int64_t> count;
  if (gives_most_rows(here)) count = most;
  rows = shard_.dispatch ? shard_.dispatch(rows, counts, *experts_, beside)
                         : experts_->forward(rows, RowGroups(counts, count));
  return tokens_of_rows(rows, routing.weights, order);
}

}  // namespace tessera::nn
