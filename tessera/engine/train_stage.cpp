#include "tessera/engine/train_stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/loss.h"
#include "tessera/optim/gradient_norm.h"

namespace tessera::engine {

TrainStage::TrainStage(parallel::Composed& composed,
                       optim::Optimizer& optimizer, comm::Group& world,
                       double clip_norm)
    : composed_(composed),
      optimizer_(optimizer),
      world_(world),
      clip_norm_(clip_norm) {}

void TrainStage::begin(StepInput input, int64_t /*num_microbatches*/) {
  input_ = std::move(input);
  loss_sum_ = 0;
  weight_ = 0;
  aux_sum_ = 0;
  expert_load_ = at::Tensor();
  grad_norm_ = 0;
}

void TrainStage::zero_gradients() { composed_.parameters->zero_gradients(); }

void TrainStage::count(double sum, double weight, int64_t microbatch) {
  TS_CHECK(std::isfinite(sum), "train: the loss of micro-batch ", microbatch,
           " is ", sum,
           ". A smaller optimizer.lr, a longer schedule.warmup or "
           "a lower optimizer.clip_norm may help; the last checkpoint is "
           "whole.");
  loss_sum_ += sum;
  weight_ += weight;
}

void TrainStage::count(const nn::Balance& balance) {
  if (!balance.loss.defined()) return;
  aux_sum_ += balance.loss.item<double>();
  expert_load_ =
      expert_load_.defined() ? expert_load_ + balance.load : balance.load;
}

// Every element of the model counts on one rank.
void TrainStage::take_norm() {
  std::vector<at::Tensor> owned;
  for (const auto& parameter : composed_.parameters->parameters()) {
    if (parameter.layout.owned_by(composed_.coord)) {
      owned.push_back(parameter.gradient);
    }
  }
  at::Tensor sum = at::tensor({optim::sum_of_squares(owned)}, at::kDouble);
  if (world_.size() > 1) world_.all_reduce(sum).wait();
  grad_norm_ = std::sqrt(sum.item<double>());
  TS_CHECK(std::isfinite(grad_norm_), "train: the gradient's norm is ",
           grad_norm_, "; the weights were not changed by this step.");
}

void TrainStage::clip_norm() {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : composed_.parameters->parameters()) {
    gradients.push_back(parameter.gradient);
  }
  optim::scale_gradients(gradients, optim::clip_scale(grad_norm_, clip_norm_));
}

void TrainStage::optimizer_step() { optimizer_.step(input_.lr); }

RankStage::RankStage(models::Model& decoder, parallel::Composed& composed,
                     optim::Optimizer& optimizer, comm::Group& world,
                     double clip_norm, const RecomputeOptions& recompute)
    : TrainStage(composed, optimizer, world, clip_norm),
      decoder_(decoder),
      recompute_(recompute) {}

nn::LossSum RankStage::evaluate(const data::Batch& whole) {
  using program::Op;
  const at::NoGradGuard no_grad;
  const auto on_owners = [&](int64_t unit, auto act) {
    for (int64_t owner : composed_.units.reads[unit]) {
      if (composed_.units.zero_stages[owner] == 3) act(owner);
    }
  };
  const data::Batch batch = local(whole);
  const int64_t samples = batch.inputs.size(0), tokens = batch.inputs.size(1);
  nn::LossSum loss{at::zeros({}, at::kDouble), at::zeros({}, at::kDouble)};
  const auto& chunks = composed_.units.chunks;
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto chunk = static_cast<int64_t>(c);
    at::Tensor x = batch.inputs;
    if (chunks[c].front() != 0) {
      x = hidden(samples, tokens);
      const Wire wire = wire_of({Op::kReceiveActivations, 0, -1, chunk});
      composed_.pipeline->recv(x, wire.peer, wire.tag).wait();
    }
    for (int64_t unit : chunks[c]) {
      on_owners(unit, [&](int64_t o) { composed_.parameters->gather(o); });
      x = decoder_.forward_unit(unit, x, tokens);
      on_owners(unit, [&](int64_t o) { composed_.parameters->free(o); });
    }
    if (is_last(chunks[c].back())) {
      loss = decoder_.loss_of(std::move(x), batch.targets);
    } else {
      const Wire wire = wire_of({Op::kSendActivations, 0, -1, chunk});
      composed_.pipeline->send(x.contiguous(), wire.peer, wire.tag).wait();
    }
  }
  // The ranks of tp all have the same.
  if (composed_.coord[mesh::Axis::kTp] > 0) {
    return {at::zeros({}, at::kDouble), at::zeros({}, at::kDouble)};
  }
  return loss;
}

void RankStage::begin(StepInput input, int64_t num_microbatches) {
  TrainStage::begin(std::move(input), num_microbatches);
  microbatches_.assign(num_microbatches, {});
  for (auto& each : microbatches_) each.units.resize(decoder_.num_units());
}

data::Batch RankStage::local(const data::Batch& batch) const {
  const int64_t rank = composed_.coord[mesh::Axis::kCp];
  const int64_t degree = composed_.mesh.degree(mesh::Axis::kCp);
  return {parallel::context::local_tokens(batch.inputs, rank, degree),
          parallel::context::local_tokens(batch.targets, rank, degree)};
}

// Inputs and targets are one read of the token file.
void RankStage::load(int64_t microbatch) {
  data::Batch& batch = microbatches_.at(microbatch).batch;
  if (batch.inputs.defined()) return;
  batch = local(input_.load(composed_.data->rank(), microbatch));
}

void RankStage::load_inputs(int64_t microbatch) { load(microbatch); }

void RankStage::load_targets(int64_t microbatch) { load(microbatch); }

at::Tensor RankStage::hidden(int64_t samples, int64_t tokens) const {
  const auto& like = composed_.parameters->parameters().front().shard;
  return at::empty(
      {samples, tokens / decoder_.sequence_shards(), decoder_.config().hidden},
      like.options().requires_grad(false));
}

// A tag names kind, micro-batch and receiver.
RankStage::Wire RankStage::wire_of(const program::Instruction& message) const {
  const int64_t stages = composed_.pipeline->size();
  const auto ends =
      program::ends_of(message, composed_.pipeline->rank(), stages);
  const auto chunks = static_cast<int64_t>(composed_.units.chunks.size());
  const int64_t receiver = message.microbatch * chunks * stages + ends.receiver;
  return {.sends = ends.sends,
          .activations = ends.activations,
          .peer = ends.peer() % stages,
          .tag = receiver * 2 + (ends.activations ? 1 : 0)};
}

void RankStage::exchange(const program::Program& messages) {
  std::vector<comm::Work> works;
  std::vector<at::Tensor> sent;  // alive until they have arrived
  for (const auto& message : messages) {
    const Wire wire = wire_of(message);
    const auto& units = composed_.units.chunks.at(message.chunk);
    Microbatch& mine = microbatches_.at(message.microbatch);
    Passed& first = mine.units.at(units.front());
    Passed& last = mine.units.at(units.back());
    if (wire.sends) {
      sent.push_back((wire.activations ? last.output.detach()
                                       : std::exchange(first.input, {}).grad())
                         .contiguous());
      works.push_back(
          composed_.pipeline->send(sent.back(), wire.peer, wire.tag));
    } else {
      at::Tensor& into = wire.activations ? first.input : last.gradient;
      into = hidden(input_.samples, input_.tokens);
      works.push_back(composed_.pipeline->recv(into, wire.peer, wire.tag));
    }
  }
  for (auto& work : works) work.wait();
}

bool RankStage::is_recomputed(int64_t unit) const {
  const bool is_block = unit > 0 && !is_last(unit);
  return is_block && recompute_.every > 0 && (unit - 1) % recompute_.every == 0;
}

void RankStage::forward(int64_t microbatch, int64_t unit) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& here = mine.units.at(unit);
  if (unit == 0) {
    here.input = mine.batch.inputs;
  } else {
    // From the unit before, or as it was received.
    const at::Tensor& before = mine.units.at(unit - 1).output;
    if (!here.input.defined()) here.input = before.detach();
    here.input.requires_grad_();
  }
  const bool again = is_recomputed(unit);
  const at::AutoGradMode records(!again);
  here.output = decoder_.forward_unit(unit, here.input, input_.tokens,
                                      again ? nullptr : &here.balance);
}

void RankStage::backward(int64_t microbatch, int64_t unit) {
  Microbatch& mine = microbatches_.at(microbatch);
  for (int64_t owner : composed_.units.reads[unit]) {
    composed_.parameters->begin_backward(owner);
  }
  Passed& here = mine.units.at(unit);
  at::Tensor output = std::exchange(here.output, {});
  if (is_recomputed(unit)) {
    output =
        decoder_.forward_unit(unit, here.input, input_.tokens, &here.balance);
  }
  if (is_last(unit)) {
    const nn::LossSum loss =
        decoder_.loss_of(std::move(output), mine.batch.targets);
    count(loss.sum.item<double>(), loss.weight.item<double>(), microbatch);
    output = loss.sum / input_.target_tokens;
  }
  std::vector<at::Tensor> ends = {output};
  std::vector<at::Tensor> gradients = {std::exchange(here.gradient, {})};
  const nn::Balance balance = std::exchange(here.balance, {});
  count(balance);
  if (balance.loss.defined() && input_.aux_scale > 0) {
    ends.push_back(balance.loss * input_.aux_scale);
    gradients.emplace_back();
  }
  torch::autograd::backward(ends, gradients);
  if (unit == 0) return;
  // To the unit before, unless another stage has it.
  Passed& before = mine.units.at(unit - 1);
  if (before.output.defined()) {
    before.gradient = std::exchange(here.input, {}).grad();
  }
}

void RankStage::gather_parameters(int64_t unit) {
  composed_.parameters->gather(unit);
}

void RankStage::free_parameters(int64_t unit) {
  composed_.parameters->free(unit);
}

void RankStage::reduce_gradients(int64_t unit) {
  composed_.parameters->reduce(unit);
}

void RankStage::await_gradients() {
  composed_.parameters->await();
  take_norm();
}

StarStage::StarStage(std::vector<std::shared_ptr<models::Model>> decoders,
                     parallel::Composed& composed, optim::Optimizer& optimizer,
                     comm::Group& world, double clip_norm)
    : TrainStage(composed, optimizer, world, clip_norm),
      decoders_(std::move(decoders)),
      replicas_({decoders_.begin(), decoders_.end()},
                std::vector<at::Device>(decoders_.size(), at::kCPU)),
      batches_(decoders_.size()) {}

nn::LossSum StarStage::evaluate(const data::Batch& batch) {
  const at::NoGradGuard no_grad;
  return decoders_[0]->loss(batch.inputs, batch.targets);
}

// Device 0 is the busiest: what it sends and receives.
Traffic StarStage::so_far() const {
  const auto& first = replicas_.traffic()[0];
  return {.seconds = replicas_.star_seconds(),
          .bytes = first.model_in + first.model_out + first.batch_in +
                   first.batch_out};
}

Traffic StarStage::traffic() const { return so_far() - before_; }

void StarStage::zero_gradients() {
  before_ = so_far();
  TrainStage::zero_gradients();
  replicas_.replicate();
}

void StarStage::load_inputs(int64_t microbatch) {
  for (size_t device = 0; device < batches_.size(); ++device) {
    batches_[device] = input_.load(static_cast<int64_t>(device), microbatch);
    replicas_.count_batch(0, device, batches_[device].inputs);
  }
}

void StarStage::load_targets(int64_t /*microbatch*/) {
  for (size_t device = 0; device < batches_.size(); ++device) {
    replicas_.count_batch(0, device, batches_[device].targets);
  }
}

// A device's graph stays on its thread: backward() does both directions there.
void StarStage::forward(int64_t /*microbatch*/, int64_t /*unit*/) {}

void StarStage::backward(int64_t microbatch, int64_t /*unit*/) {
  std::vector<std::pair<double, double>> sums(decoders_.size());
  std::vector<nn::Balance> balances(decoders_.size());
  replicas_.run(decoders_.size(), [&](size_t device) {
    const auto& batch = batches_[device];
    nn::Balance& balance = balances[device];
    const nn::LossSum loss =
        decoders_[device]->loss(batch.inputs, batch.targets, &balance);
    sums[device] = {loss.sum.item<double>(), loss.weight.item<double>()};
    at::Tensor whole = loss.sum / input_.target_tokens;
    if (balance.loss.defined()) {
      whole = whole + balance.loss * input_.aux_scale;
    }
    torch::autograd::backward({whole}, {});
  });
  for (const auto& [sum, weight] : sums) count(sum, weight, microbatch);
  for (const auto& balance : balances) count(balance);
}

// Its program names the whole stage: there is nothing to send, to gather or to
// reduce.
void StarStage::exchange(const program::Program& /*messages*/) {}
void StarStage::gather_parameters(int64_t /*unit*/) {}
void StarStage::free_parameters(int64_t /*unit*/) {}
void StarStage::reduce_gradients(int64_t /*unit*/) {}

void StarStage::await_gradients() {
  replicas_.reduce_gradients();
  take_norm();
}

}  // namespace tessera::engine
