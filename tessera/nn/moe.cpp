#include "tessera/nn/moe.h"

#include <ATen/ATen.h>

#include <string>

#include "tessera/comm/autograd.h"
#include "tessera/mesh/layout.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// How often each of 0 .. kinds - 1 occurs.
at::Tensor counts_of(const at::Tensor& numbers, int64_t kinds) {
  return at::bincount(numbers.flatten(), /*weights=*/{}, kinds);
}

std::vector<int64_t> to_vector(const at::Tensor& numbers) {
  const at::Tensor flat = numbers.contiguous();
  const int64_t* first = flat.const_data_ptr<int64_t>();
  return {first, first + flat.numel()};
}

// Stable: rows for one expert keep their order.
at::Tensor order_of(const at::Tensor& numbers) {
  return at::argsort(numbers, /*stable=*/true, /*dim=*/0,
                     /*descending=*/false);
}

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(
      0, order, at::arange(order.numel(), order.options()));
}

}  // namespace

Moe::Moe(const MoeOptions& options) : top_k_(options.top_k) {
  gate_ =
      register_module("gate", std::make_shared<Linear>(LinearOptions{
                                  options.expert.width, options.experts,
                                  /*bias=*/false, options.expert.init_std}));
  auto experts = register_module("experts", std::make_shared<Room>());
  for (int64_t e = 0; e < options.experts; ++e) {
    experts_.push_back(experts->register_module(
        std::to_string(e), std::make_shared<Mlp>(options.expert)));
  }
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
  const auto experts = static_cast<int64_t>(experts_.size());
  const at::Tensor& p = routing.probabilities;
  const at::Tensor picked = routing.experts.view({samples, -1});
  const at::Tensor rows =
      at::zeros({samples, experts}, p.options().requires_grad(false))
          .scatter_add_(1, picked,
                        at::ones({1}, p.options()).expand_as(picked));
  const at::Tensor load = rows.sum(0).to(at::kDouble) / shard_.copies;
  int64_t tokens = picked.size(1) / top_k_;  // of a sample, over all ranks
  if (shard_.samples) {
    shard_.samples->all_reduce(rows, comm::ReduceOp::kSum,
                               comm::Mode::kBlocking);
    tokens *= shard_.samples->size();
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
  const auto num_experts = static_cast<int64_t>(experts_.size());
  const int64_t shares = shard_.shares_tokens ? shard_.copies : 1;
  const mesh::Range share = mesh::chunk_of(
      tokens.size(0), shares, shard_.shares_tokens ? shard_.copy : 0);
  const auto own = [&](const at::Tensor& t) {
    return t.narrow(0, share.begin, share.size()).flatten();
  };
  const at::Tensor picked = own(routing.experts);
  const at::Tensor order = order_of(picked);
  const at::Tensor token = order.floor_divide(top_k_) + share.begin;
  at::Tensor rows = tokens.index_select(0, token);

  // counts: (ranks, experts of a rank), rows that come here from each rank.
  at::Tensor counts = counts_of(picked, num_experts);
  if (!shard_.exchange) {
    rows = run_local(rows, counts.view({1, -1}));
  } else {
    comm::Group& ranks = *shard_.exchange;
    const int64_t n = ranks.size();
    const at::Tensor all = at::empty({n, num_experts}, counts.options());
    ranks.all_gather(all, counts, comm::Mode::kBlocking);
    const auto sent = to_vector(counts.view({n, -1}).sum(1));
    counts = all.view({n, n, -1}).select(1, ranks.rank());
    const auto received = to_vector(counts.sum(1));
    rows = comm::all_to_all(rows, ranks, received, sent);
    rows = run_local(rows, counts);
    rows = comm::all_to_all(rows, ranks, sent, received);
  }
  const at::Tensor weights =
      own(routing.weights).index_select(0, order).to(rows.scalar_type());
  return at::zeros_like(tokens).index_add(0, token,
                                          rows * weights.unsqueeze(1));
}

// Rows come by source, and of each by expert; they leave in the same order.
at::Tensor Moe::run_local(const at::Tensor& rows,
                          const at::Tensor& counts) const {
  const int64_t sources = counts.size(0), local = counts.size(1);
  const int64_t rank = shard_.exchange ? shard_.exchange->rank() : 0;
  const at::Tensor expert = at::arange(local, counts.options())
                                .repeat({sources})
                                .repeat_interleave(counts.flatten());
  const at::Tensor order = order_of(expert);
  const at::Tensor sorted = rows.index_select(0, order);
  std::vector<at::Tensor> outputs;
  int64_t begin = 0;
  for (int64_t e = 0; e < local; ++e) {
    const int64_t size = counts.select(1, e).sum().item<int64_t>();
    outputs.push_back(
        experts_[rank * local + e]->forward(sorted.narrow(0, begin, size)));
    begin += size;
  }
  return at::cat(outputs).index_select(0, inverse_of(order));
}

}  // namespace tessera::nn
