// One rank of a mesh, played alone over the fake backend, and what it does: the
// bytes that the allocator counts, the operators that are dispatched, and the
// counters of its groups. Experts get as many rows each, as facts assume, by
// inputs that a gate tells apart.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/models/model.h"
#include "tessera/monitor/memory.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/facts.h"
#include "tests/facts/cases.h"
#include "tests/facts/flop_counter.h"

namespace tessera::testing {

using mesh::Axis;

struct Measured {
  program::Flops forward, backward;
  int64_t alive = 0, forward_peak = 0, backward_peak = 0, after = 0;
  int64_t plain_peak = 0;
  // By ranks of the group and verb.
  using Calls = std::map<std::pair<std::vector<int64_t>, std::string>,
                         std::pair<int64_t, int64_t>>;
  Calls forward_calls, backward_calls;
};

// One rank of a case, with its part of the model.
class Player {
 public:
  explicit Player(const Case& of)
      : case_(of),
        mesh_(of.degrees, of.degrees.pp * of.degrees.dp_replicate *
                              of.degrees.dp_shard * of.degrees.cp *
                              of.degrees.tp),
        ranks_(comm::make_communicator({.backend = "fake",
                                        .rank = of.rank,
                                        .world_size = mesh_.world_size()})),
        model_(models::make_model(of.model)),
        config_(config_of(of)) {
    composed_ = parallel::compose(*model_, mesh_, *ranks_, {.config = config_});
    route_evenly();
  }

  const parallel::Composed& composed() const { return composed_; }
  program::Facts facts(const char* recompute = "none") const {
    parallel::ParallelConfig config = config_;
    config.recompute.mode = recompute;
    return parallel::PlacedModel(case_.model, mesh_, config)
        .facts_of(composed_.coord, {.samples = samples(),
                                    .seq_len = case_.options.seq_len,
                                    .depths = case_.model.mtp.layers});
  }

  // A micro-batch through all units that are here and back: what is alive
  // behind each.
  std::vector<int64_t> run_all();

  std::vector<program::ParameterFacts> held(const program::Facts& facts) const {
    std::vector<int64_t> units;
    for (const auto& chunk : composed_.units.chunks) {
      units.insert(units.end(), chunk.begin(), chunk.end());
    }
    return program::held_by(facts, units);
  }

  // Full parameters, and memory for their gradients.
  void gather() {
    for (int64_t unit = 0; unit < num_owners(); ++unit) {
      composed_.parameters->begin_gather(unit, comm::Mode::kBlocking);
      composed_.parameters->await_gather(unit);
      composed_.parameters->allocate_gradients(unit);
    }
    composed_.parameters->zero_gradients();
    route_evenly();
  }

  // Gathers all that is gathered in a step, and reduces all gradients.
  Measured::Calls move_parameters() {
    calls();
    gather();
    for (int64_t unit = 0; unit < num_owners(); ++unit) {
      composed_.parameters->begin_reduction(unit, comm::Mode::kBlocking);
      composed_.parameters->await_reduction(unit);
      composed_.parameters->begin_sum(unit, comm::Mode::kBlocking);
      composed_.parameters->await_sum(unit);
    }
    return calls();
  }

  Measured run(int64_t unit) {
    Measured found;
    const at::Tensor input = input_of(unit);
    {
      const at::NoGradGuard no_grad;
      const int64_t before = restart();
      model_->forward_unit(unit, input, step_tokens());
      found.plain_peak = monitor::tensor_bytes().peak - before;
    }
    int64_t before = restart();
    nn::Balance balance;
    models::Tokens tokens = step_tokens();
    at::Tensor output = model_->forward_unit(unit, input, tokens, &balance);
    found.alive = monitor::tensor_bytes().now - before;
    found.forward_peak = monitor::tensor_bytes().peak - before;
    found.forward_calls = calls();
    nn::settle(balance, *std::exchange(tokens.load, {}));

    std::vector<at::Tensor> roots = {output};
    std::vector<at::Tensor> gradients = {at::empty_like(output).zero_()};
    if (balance.penalty.defined()) {
      roots.push_back(balance.penalty * 0.5);
      gradients.emplace_back();
    }
    const int64_t alive_before = restart();
    torch::autograd::backward(roots, gradients);
    found.backward_peak = monitor::tensor_bytes().peak - alive_before;
    found.backward_calls = calls();
    roots.clear();
    gradients.clear();
    output = at::Tensor();
    balance = {};
    found.after = monitor::tensor_bytes().now - before;
    count_flops(unit, input.detach(), found);
    return found;
  }

  // A block whose attention keeps q, k and v alone: its forward, and as if it
  // were its backward what attention's core takes again.
  Measured run_core_again(int64_t unit) {
    Measured found;
    const at::Tensor input = input_of(unit);
    nn::Balance balance;
    nn::CoreAgain again;
    const int64_t first = restart();
    const at::Tensor output =
        model_->forward_unit(unit, input, step_tokens(), &balance, &again);
    found.alive = monitor::tensor_bytes().now - first;
    found.forward_peak = monitor::tensor_bytes().peak - first;
    const int64_t before = restart();
    again.compute();
    found.after = monitor::tensor_bytes().now - before;
    found.backward_peak = monitor::tensor_bytes().peak - before;
    found.backward_calls = calls();
    model_->forward_unit(unit, input, step_tokens(), nullptr, &again);
    const FlopCounter flops;
    again.compute();
    found.backward = FlopCounter::take();
    return found;
  }

  void count_flops(int64_t unit, at::Tensor input, Measured& found) {
    if (unit > 0) input.requires_grad_();
    const FlopCounter flops;
    const at::Tensor output = model_->forward_unit(unit, input, step_tokens());
    found.forward = FlopCounter::take();
    torch::autograd::backward({output}, {at::zeros_like(output)});
    found.backward = FlopCounter::take();
  }

  // The last unit is on this rank.
  bool has_head() const {
    return composed_.units.chunks.back().back() == model_->num_units() - 1;
  }

  // The head and its loss, as a step and as an evaluation have them.
  Measured run_loss() {
    Measured found;
    const int64_t depths = 1 + model_->num_ahead();
    const at::Tensor hidden = at::zeros(
        {depths, samples(), tokens(), model_->config().hidden}, type());
    const at::Tensor targets = at::zeros({samples(), tokens()}, at::kLong);
    const at::NoGradGuard no_grad;
    const auto losses = [&](std::optional<double> scale) {
      for (const at::Tensor& each : hidden.unbind()) {
        model_->loss_of(each, targets, scale);
      }
    };
    int64_t before = restart();
    losses({});
    found.plain_peak = monitor::tensor_bytes().peak - before;
    before = restart();
    const FlopCounter flops;
    losses(1.0);
    found.forward = FlopCounter::take();
    found.alive = monitor::tensor_bytes().now - before;
    found.forward_peak = monitor::tensor_bytes().peak - before;
    found.forward_calls = calls();
    return found;
  }

 private:
  static parallel::ParallelConfig config_of(const Case& of) {
    parallel::ParallelConfig config;
    config.precision.compute = of.options.compute;
    config.precision.products = of.options.products;
    config.tensor.sequence_parallel = of.options.sequence_parallel;
    config.context.method = of.options.context_method;
    config.zero.stage = of.options.zero_stage;
    config.expert.dispatch_chunks = of.options.dispatch_chunks;
    config.resolve(/*ranks_share_memory=*/true);
    return config;
  }
  int64_t num_owners() const {
    return static_cast<int64_t>(composed_.units.all.size());
  }
  at::TensorOptions type() const {
    return at::TensorOptions().dtype(config_.precision.compute_dtype());
  }
  int64_t samples() const { return case_.options.samples; }
  int64_t tokens() const { return case_.options.seq_len / case_.degrees.cp; }

  models::Tokens step_tokens() const {
    return {
        tokens(), {}, nn::Draw{}, std::make_shared<nn::BatchLoad>(), ahead_};
  }

  // The numbers of the vocabulary's entries, over and over.
  at::Tensor ids() const {
    return at::arange(samples() * tokens())
        .remainder(case_.model.vocab)
        .view({samples(), tokens()});
  }
  at::Tensor ids_ahead() const {
    const int64_t depths = case_.model.mtp.layers;
    return depths == 0 ? at::Tensor()
                       : at::stack(at::TensorList(
                             std::vector<at::Tensor>(depths, ids())));
  }

  // Bytes alive; peak and counters begin again.
  int64_t restart() {
    calls();
    monitor::reset_tensor_peak();
    return monitor::tensor_bytes().now;
  }

  Measured::Calls calls() {
    Measured::Calls all;
    for (auto* group : ranks_->groups()) {
      for (const auto& verb : group->stats()) {
        if (verb.calls == 0) continue;
        auto& sum = all[{group->ranks(), verb.verb}];
        sum.first += verb.calls;
        sum.second += verb.bytes;
      }
      group->reset_stats();
    }
    return all;
  }

  // Attention adds nothing to what a gate sees, which is its rows' first
  // elements.
  void route_evenly() {
    const at::NoGradGuard no_grad;
    if (case_.model.moe.experts == 0) return;
    for (const auto& parameter : nn::parameters_of(*model_)) {
      at::Tensor weight = parameter.tensor;
      if (weight.numel() == 0 || weight.storage().nbytes() == 0) continue;
      if (parameter.name.ends_with(".attention.o.weight")) weight.zero_();
      // Noise of no size.
      if (parameter.name.ends_with(".moe.noise.weight")) weight.fill_(-100.0);
      // What is ahead of a token is not seen.
      if (parameter.name.ends_with(".mtp.proj.weight")) {
        const int64_t width = weight.size(0);
        weight.zero_().narrow(1, width, width).fill_diagonal_(1.0);
      }
      if (!parameter.name.ends_with(".moe.gate.weight")) continue;
      weight.zero_();
      for (int64_t e = 0; e < weight.size(0); ++e) weight[e][e] = 1.0;
    }
  }

  at::Tensor input_of(int64_t unit) const {
    if (unit == 0) return ids();
    const int64_t length = tokens() / model_->sequence_shards();
    const int64_t width = model_->config().hidden;
    at::Tensor x = at::full({samples() * length, width}, 0.01, type());
    const int64_t experts = model_->config().moe.experts;
    const int64_t top_k = model_->config().moe.top_k;
    for (int64_t t = 0; experts > 0 && t < x.size(0); ++t) {
      for (int64_t j = 0; j < top_k; ++j) x[t][(t * top_k + j) % experts] = 5.0;
    }
    // What is ahead lies behind it.
    const int64_t last = model_->num_units() - 1;
    const int64_t depth = std::clamp<int64_t>(
        unit - (last - model_->num_ahead()) + 1, 1, model_->num_ahead() + 1);
    x = x.view({samples(), length, width}).repeat({depth, 1, 1});
    return x.requires_grad_();
  }

  const Case& case_;
  mesh::DeviceMesh mesh_;
  std::unique_ptr<comm::Communicator> ranks_;
  std::shared_ptr<models::Model> model_;
  const parallel::ParallelConfig config_;
  const at::Tensor ahead_ = ids_ahead();
  parallel::Composed composed_;
};

inline std::vector<int64_t> Player::run_all() {
  std::vector<int64_t> units;
  for (const auto& chunk : composed_.units.chunks) {
    units.insert(units.end(), chunk.begin(), chunk.end());
  }
  std::vector<int64_t> alive;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<nn::Balance> balances(units.size());
  const models::Tokens tokens = step_tokens();
  const int64_t before = restart();
  const auto note = [&] {
    alive.push_back(monitor::tensor_bytes().now - before);
  };
  for (size_t i = 0; i < units.size(); ++i) {
    inputs.push_back(i == 0 ? input_of(units[0]) : outputs.back().detach());
    if (units[i] > 0) inputs.back().requires_grad_();
    outputs.push_back(
        model_->forward_unit(units[i], inputs.back(), tokens, &balances[i]));
    note();
  }
  at::Tensor gradient = at::zeros_like(outputs.back());
  for (size_t i = units.size(); i-- > 0;) {
    std::vector<at::Tensor> roots = {std::exchange(outputs[i], {})};
    std::vector<at::Tensor> gradients = {std::exchange(gradient, {})};
    nn::Balance balance = std::exchange(balances[i], {});
    nn::settle(balance, *tokens.load);
    if (balance.penalty.defined()) {
      roots.push_back(balance.penalty);
      gradients.emplace_back();
    }
    torch::autograd::backward(roots, gradients);
    if (units[i] > 0) gradient = std::exchange(inputs[i], {}).grad();
    roots.clear();
    gradients.clear();
    balance = {};
    note();
  }
  return alive;
}

}  // namespace tessera::testing
