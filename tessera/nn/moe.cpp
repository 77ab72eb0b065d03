#include "tessera/nn/moe.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/host_read.h"
#include "tessera/mesh/layout.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/weight_queue.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void multiply(at::Tensor y, const at::Tensor& a, const at::Tensor& b) {
  if (widens(a.scalar_type())) return product_into(y, a, b);
  at::mm_out(y, a, b);
}

// One product for each expert, written where it belongs.
class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& weight,
                            const std::vector<int64_t>& splits) {
    ctx->save_for_backward({rows, weight});
    ctx->saved_data["splits"] = splits;
    if (weight.requires_grad()) WeightQueue::remember(ctx);
    const at::Tensor y =
        at::empty({rows.size(0), weight.size(1)}, rows.options());
    const auto y_of = y.split_with_sizes(splits);
    const auto rows_of = rows.split_with_sizes(splits);
    for (size_t e = 0; e < splits.size(); ++e) {
      multiply(y_of[e], rows_of[e], weight[e].t());
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto splits = ctx->saved_data["splits"].toIntVector();
    const at::Tensor &rows = saved[0], weight = saved[1];
    const at::Tensor d_rows = at::empty_like(rows);
    const auto d_y_of = gradients[0].split_with_sizes(splits);
    const auto d_rows_of = d_rows.split_with_sizes(splits);
    for (size_t e = 0; e < splits.size(); ++e) {
      multiply(d_rows_of[e], d_y_of[e], weight[e]);
    }
    if (const auto queue = WeightQueue::open_for(ctx)) {
      // Without what made them, which holds the queue.
      queue->add([weight, splits, d_y = gradients[0], rows = rows.detach()] {
        const at::Tensor gradient = of_weight(weight, d_y, rows, splits);
        if (weight.grad().defined()) {
          weight.grad().add_(gradient);
        } else {
          weight.mutable_grad() = gradient;
        }
      });
      return {d_rows, {}, {}};
    }
    return {d_rows, of_weight(weight, gradients[0], rows, splits), {}};
  }

 private:
  static at::Tensor of_weight(const at::Tensor& weight, const at::Tensor& d_y,
                              const at::Tensor& rows,
                              const std::vector<int64_t>& splits) {
    const at::Tensor d_weight = at::empty(weight.sizes(), weight.options());
    const auto d_y_of = d_y.split_with_sizes(splits);
    const auto rows_of = rows.split_with_sizes(splits);
    for (size_t e = 0; e < splits.size(); ++e) {
      multiply(d_weight[e], d_y_of[e].t(), rows_of[e]);
    }
    return d_weight;
  }
};

// How often each of 0 .. kinds - 1 occurs.
at::Tensor counts_of(const at::Tensor& numbers, int64_t kinds) {
  return at::zeros({kinds}, numbers.options())
      .scatter_add_(0, numbers, at::ones_like(numbers));
}

// The sizes of the experts' products, which the host has to know.
std::vector<int64_t> to_host(const at::Tensor& counts) {
  const at::Tensor here = read_on_host(counts);
  const int64_t* first = here.const_data_ptr<int64_t>();
  return {first, first + here.numel()};
}

Role of_experts(Role role) {
  role.of_experts = true;
  return role;
}

}  // namespace

GroupedLinear::GroupedLinear(int64_t experts, const LinearOptions& options)
    : weight_(declare_parameter("weight", {experts, options.out, options.in},
                                Init::normal(options.init_std),
                                of_experts(options.role))) {}

at::Tensor GroupedLinear::forward(const at::Tensor& rows,
                                  const std::vector<int64_t>& splits) const {
  return GroupedProduct::apply(rows, weight_, splits);
}

Experts::Experts(int64_t experts, const MlpOptions& options)
    : kind_(options.kind) {
  const auto linear = [&](const LinearOptions& each) {
    return std::make_shared<GroupedLinear>(experts, each);
  };
  const LinearOptions in{options.width, options.hidden, /*bias=*/false,
                         options.init_std, Role::column()};
  if (kind_ == MlpKind::kSwiGlu) gate_ = register_module("gate", linear(in));
  up_ = register_module("up", linear(in));
  down_ = register_module("down",
                          linear({options.hidden, options.width, /*bias=*/false,
                                  options.out_init_std, Role::row()}));
}

at::Tensor Experts::forward(const at::Tensor& rows,
                            const std::vector<int64_t>& splits) const {
  const at::Tensor up = up_->forward(rows, splits);
  const at::Tensor gate = gate_ ? gate_->forward(rows, splits) : at::Tensor();
  return down_->forward(activated(kind_, gate, up), splits);
}

Moe::Moe(const MoeOptions& options)
    : num_experts_(options.experts), top_k_(options.top_k) {
  gate_ = register_module(
      "gate", std::make_shared<Linear>(LinearOptions{
                  options.expert.width, options.experts,
                  /*bias=*/false, options.expert.init_std, Role::router()}));
  experts_ = register_module(
      "experts", std::make_shared<Experts>(options.experts, options.expert));
}

at::Tensor Moe::forward(const at::Tensor& input, Balance* balance) const {
  const Region& region = shard_.region;
  const at::Tensor x = region.enter ? region.enter(input) : input;
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const Routing routing = route(tokens);
  if (balance) add_balance(*balance, routing, x.size(0));
  const at::Tensor y = mix(tokens, routing).view(x.sizes());
  return region.leave ? region.leave(y) : y;
}

Moe::Routing Moe::route(const at::Tensor& tokens) const {
  const at::Tensor probabilities =
      at::softmax(gate_->forward(tokens), /*dim=*/-1, wide_type(tokens));
  const auto [best, experts] = at::topk(probabilities, top_k_);
  return {probabilities, experts, best / best.sum(-1, /*keepdim=*/true)};
}

void Moe::add_balance(Balance& balance, const Routing& routing,
                      int64_t samples) const {
  const int64_t experts = num_experts_;
  const at::Tensor& p = routing.probabilities;
  const at::Tensor picked = routing.experts.view({samples, -1});
  const at::Tensor rows =
      at::zeros({samples, experts}, p.options().requires_grad(false))
          .scatter_add_(1, picked,
                        at::ones({1}, p.options()).expand_as(picked));
  const at::Tensor load = rows.sum(0).to(at::kDouble) / shard_.copies;
  int64_t tokens = picked.size(1) / top_k_;  // of a sample, over all ranks
  if (shard_.sum_samples) {
    shard_.sum_samples(rows);
    tokens *= shard_.sample_parts;
  }
  const double scale = static_cast<double>(experts) /
                       static_cast<double>(tokens * tokens * shard_.copies);
  const at::Tensor loss =
      (rows * p.view({samples, -1, experts}).sum(1)).sum() * scale;
  balance.loss = balance.loss.defined() ? balance.loss + loss : loss;
  balance.load = balance.load.defined() ? balance.load + load : load;
}

// This rank's part of y, of tokens (N, D).
at::Tensor Moe::mix(const at::Tensor& tokens, const Routing& routing) const {
  const int64_t shares = shard_.shares_tokens ? shard_.copies : 1;
  const mesh::Range share = mesh::chunk_of(
      tokens.size(0), shares, shard_.shares_tokens ? shard_.copy : 0);
  const auto own = [&](const at::Tensor& t) {
    return t.narrow(0, share.begin, share.size()).flatten();
  };
  const at::Tensor picked = own(routing.experts);
  // Stable: rows for one expert keep their order.
  const at::Tensor order = at::argsort(picked, /*stable=*/true, /*dim=*/0,
                                       /*descending=*/false);
  const at::Tensor token = order.floor_divide(top_k_) + share.begin;
  at::Tensor rows = tokens.index_select(0, token);
  const at::Tensor counts = counts_of(picked, num_experts_);
  rows = shard_.dispatch ? shard_.dispatch(rows, counts, *experts_)
                         : experts_->forward(rows, to_host(counts));
  const at::Tensor weights =
      own(routing.weights).index_select(0, order).to(rows.scalar_type());
  return at::zeros_like(tokens).index_add(0, token,
                                          rows * weights.unsqueeze(1));
}

}  // namespace tessera::nn
