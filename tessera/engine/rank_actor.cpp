#include "tessera/engine/rank_actor.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

#include "tessera/core/device.h"
#include "tessera/data/ahead.h"
#include "tessera/engine/wire.h"
#include "tessera/nn/loss.h"

namespace tessera::engine {

using program::Instruction;
using program::Op;

RankActor::RankActor(models::Model& model, parallel::Composed& composed,
                     optim::Optimizer* optimizer, comm::Group& world,
                     const GradientRules& rules, FileMemory* files,
                     std::unique_ptr<SharedSteps> steps)
    : ModelActor(composed, optimizer, world, rules, files),
      model_(model),
      steps_(std::move(steps)) {}

void RankActor::begin_program(StepInput input, int64_t num_microbatches,
                              program::Purpose purpose,
                              std::optional<StepInput> next) {
  const bool goes_on = is_ahead();
  const auto count =
      static_cast<size_t>(num_microbatches * (next.has_value() ? 2 : 1));
  if (!goes_on) microbatches_.clear();
  microbatches_.resize(count);
  for (auto& each : microbatches_) each.units.resize(model_.num_units());
  ModelActor::begin_program(std::move(input), num_microbatches, purpose,
                            std::move(next));
}

Reading RankActor::reading_of(const StepRead& read) const {
  return {.microbatch =
              [&, share = composed_.data->rank()](int64_t microbatch) {
                return read.load(share, microbatch);
              },
          .num_targets = read.num_targets};
}

// What the step before had moved is this one's, but for the first one, and one
// that runs again.
std::vector<int64_t> RankActor::open_batch() {
  if (!steps_) return ModelActor::open_batch();
  BatchShare& share = steps_->share;
  if (share.coming() != input_.step) {
    share.begin(input_.step, steps_->extent, reading_of(input_.read),
                comm::Mode::kBlocking);
    share.await();
  }
  share.turn();
  return share.num_targets();
}

// The next batch's is the step's, as far as it has come.
void RankActor::next_version() {
  ModelActor::next_version();
  const auto done = microbatches_.begin() + num_microbatches_;
  microbatches_.erase(microbatches_.begin(), done);
  std::map<Key, Message> under_way;
  for (auto& [key, message] : messages_) {
    const auto& [op, microbatch, chunk] = key;
    under_way[{op, microbatch - num_microbatches_, chunk}] = std::move(message);
  }
  messages_ = std::move(under_way);
}

void RankActor::use_parameters(int64_t unit) {
  for (int64_t owner : composed_.units.all[unit].reads) {
    composed_.parameters->use(owner, version_);
  }
}

// Where the documents of a sample begin every rank knows of all of it.
data::Batch RankActor::local(const data::Batch& batch) const {
  return {there(composed_.local_tokens(batch.inputs)),
          there(composed_.local_tokens(batch.targets)), batch.document_starts};
}

// Where this rank computes.
at::Tensor RankActor::there(const at::Tensor& tokens) const {
  return sent_to(tokens, composed_.activations.device());
}

at::Tensor RankActor::local_ahead(const at::Tensor& tokens) const {
  return there(composed_.local_tokens(tokens.flatten(0, 1)))
      .unflatten(0, {tokens.size(0), -1});
}

models::Tokens RankActor::tokens_of(int64_t microbatch) const {
  const Microbatch& mine = microbatches_.at(microbatch);
  return {input_.tokens,
          mine.batch.document_starts,
          draw_of(composed_.data->rank(), microbatch),
          trains() ? mine.load : nullptr,
          mine.inputs_ahead,
          /*drops_none=*/static_cast<bool>(input_.on_logits),
          input_.unpadded};
}

data::Batch RankActor::whole_batch(int64_t microbatch) const {
  if (steps_ && trains()) return steps_->share.microbatch(microbatch);
  return input_of(microbatch)
      .read.load(composed_.data->rank(), in_batch(microbatch));
}

// All of it is one read of the token file. What is ahead of a rank's tokens may
// be another's.
void RankActor::load(int64_t microbatch) {
  Microbatch& mine = microbatches_.at(microbatch);
  if (mine.batch.inputs.defined()) return;
  const data::Batch whole = whole_batch(microbatch);
  mine.batch = local(whole);
  const int64_t depths = input_of(microbatch).depths;
  if (depths == 0) return;
  mine.inputs_ahead = local_ahead(data::inputs_ahead(whole, depths));
  mine.targets_ahead = local_ahead(data::targets_ahead(whole, depths));
}

void RankActor::load_in_place() {
  const bool is_first = places_.empty();
  for (int64_t i = 0; i < num_microbatches_; ++i) {
    load(i);
    data::Batch& batch = microbatches_[i].batch;
    if (is_first) {
      places_.push_back(batch);
      continue;
    }
    places_[i].inputs.copy_(batch.inputs);
    places_[i].targets.copy_(batch.targets);
    batch = places_[i];
  }
}

void RankActor::load_inputs(int64_t microbatch) { load(microbatch); }

void RankActor::load_targets(int64_t microbatch) { load(microbatch); }

void RankActor::load_documents(int64_t microbatch) { load(microbatch); }

at::Tensor RankActor::hidden() const {
  return at::empty({input_.samples, input_.tokens / model_.sequence_shards(),
                    model_.config().hidden},
                   composed_.activations);
}

int64_t RankActor::unit_before(int64_t unit) const {
  const bool is_last = unit == model_.num_units() - 1;
  return unit - 1 - (is_last && !trains() ? model_.num_ahead() : 0);
}

int64_t RankActor::first_of(const std::vector<int64_t>& chunk) const {
  const bool passes = !trains() && model_.is_ahead(chunk.front());
  return passes ? model_.num_units() - 1 : chunk.front();
}

// From the unit before, or as it was received. An output without a graph is for
// the unit behind it alone.
void RankActor::take_input(Microbatch& mine, int64_t unit) {
  Passed& here = mine.units.at(unit);
  if (unit == 0) {
    here.input = mine.batch.inputs;
    return;
  }
  Passed& before = mine.units.at(unit_before(unit));
  if (!here.input.defined()) here.input = before.output.detach();
  if (!before.keeps) before.output = at::Tensor();
  here.input.requires_grad_(trains());
}

// What keeps nothing lets go of its input, unless the forward will start there
// again.
void RankActor::run(int64_t microbatch, int64_t unit, bool keeps) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& here = mine.units.at(unit);
  use_parameters(unit);
  take_input(mine, unit);
  here.keeps = keeps;
  const program::Unit& of = composed_.units.all[unit];
  const at::AutoGradMode records(keeps);
  here.later = keeps ? c10::make_intrusive<nn::WeightQueue>() : nullptr;
  const nn::WeightQueue::Scope scope(here.later);
  here.output = model_.forward_unit(
      unit, here.input, tokens_of(microbatch), keeps ? &here.balance : nullptr,
      keeps && of.attention_alone ? &here.attention : nullptr);
  const bool stays = trains() && of.recomputed_from == unit;
  if (!keeps && !stays) here.input = at::Tensor();
}

void RankActor::forward(int64_t microbatch, int64_t unit) {
  const program::Unit& of = composed_.units.all[unit];
  run(microbatch, unit,
      trains() && (!of.recomputed_from || of.attention_alone));
}

void RankActor::recompute(int64_t microbatch, int64_t unit) {
  if (composed_.units.all[unit].attention_alone) {
    use_parameters(unit);
    return microbatches_.at(microbatch).units.at(unit).attention.compute();
  }
  run(microbatch, unit, /*keeps=*/true);
}

void RankActor::replay(int64_t microbatch, int64_t unit) {
  run(microbatch, unit, /*keeps=*/false);
}

// The gradient takes the place of the last unit's output at once: its backward
// starts from there like every other's. No norm keeps what it gave, nor does
// what enters the head: autograd need not hear of the change.
void RankActor::loss(int64_t microbatch) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& last = mine.units.back();
  use_parameters(model_.num_units() - 1);
  const at::NoGradGuard no_grad;
  const at::Tensor hidden = last.output.variable_data();
  if (!last.keeps) last.output = at::Tensor();
  if (input_.on_logits) input_.on_logits(model_.logits_of(hidden));
  const int64_t samples = mine.batch.targets.size(0);
  const nn::LossSum loss =
      model_.loss_of(hidden.narrow(0, 0, samples), mine.batch.targets,
                     gradient_factor(microbatch));
  if (mine.inputs_ahead.defined()) predict_ahead(mine, microbatch, hidden);
  // The ranks of tp all have the same: in an evaluation the first one counts.
  if (trains() || composed_.coord[mesh::Axis::kTp] == 0) {
    count(loss, microbatch);
  }
  if (trains()) last.gradient = hidden;
}

// What each depth gave lies behind what the head took of the model.
void RankActor::predict_ahead(Microbatch& mine, int64_t microbatch,
                              const at::Tensor& hidden) {
  const int64_t samples = mine.batch.targets.size(0);
  for (int64_t depth = 1; depth <= mine.targets_ahead.size(0); ++depth) {
    count_ahead(model_.loss_of(hidden.narrow(0, depth * samples, samples),
                               mine.targets_ahead[depth - 1],
                               ahead_factor(microbatch, depth)),
                microbatch, depth);
  }
}

RankActor::Start RankActor::start_backward(int64_t microbatch, int64_t unit) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& here = mine.units.at(unit);
  const double scale = input_of(microbatch).aux_scale;
  Start start{.ends = {std::exchange(here.output, {})},
              .gradients = {std::exchange(here.gradient, {})}};
  nn::Balance balance = std::exchange(here.balance, {});
  nn::settle(balance, *mine.load);
  count(balance, microbatch);
  // Where nothing before it is trained, as beside adapters, it pulls at none.
  if (balance.penalty.defined() && balance.penalty.requires_grad()) {
    start.ends.push_back(balance.penalty * scale);
    start.gradients.emplace_back();
  }
  return start;
}

void RankActor::backward_input(Passed& here, const Start& start, int64_t unit) {
  std::vector<at::Tensor> parameters;
  for (int64_t owner : composed_.units.all[unit].reads) {
    for (const auto& each : composed_.parameters->full(owner)) {
      if (each.requires_grad()) parameters.push_back(each);
    }
  }
  here.input.mutable_grad() =
      here.later->put_off(start.ends, start.gradients, here.input, parameters);
}

void RankActor::backward(Op part, int64_t microbatch, int64_t unit) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& here = mine.units.at(unit);
  use_parameters(unit);
  if (part == Op::kBackwardWeight) {
    std::exchange(here.later, {})->run();
    return;
  }
  const Start start = start_backward(microbatch, unit);
  // Of a unit that is frozen as a whole there may be nothing to ask for: where
  // it has no input with a gradient.
  const at::Tensor& end = start.ends.front();
  if (!end.defined() || end.requires_grad()) {
    if (part == Op::kBackwardInput) {
      backward_input(here, start, unit);
    } else {
      torch::autograd::backward(start.ends, start.gradients);
    }
  }
  if (part == Op::kBackward) here.later = nullptr;
  hand_on(mine, unit);
}

// The gradient of its input goes to the unit before, unless another stage has
// it.
void RankActor::hand_on(Microbatch& mine, int64_t unit) {
  const bool is_first = std::ranges::any_of(
      composed_.units.chunks,
      [&](const std::vector<int64_t>& chunk) { return chunk.front() == unit; });
  if (is_first) return;
  mine.units.at(unit - 1).gradient =
      std::exchange(mine.units.at(unit).input, {}).grad();
}

void RankActor::hand_activations(int64_t microbatch, int64_t chunk) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& last = mine.units.at(composed_.units.chunks.at(chunk).back());
  const auto& next = composed_.units.chunks.at(chunk + 1);
  mine.units.at(first_of(next)).input = last.output.detach();
  if (!last.keeps) last.output = at::Tensor();
}

void RankActor::hand_gradients(int64_t microbatch, int64_t chunk) {
  Microbatch& mine = microbatches_.at(microbatch);
  Passed& first = mine.units.at(composed_.units.chunks.at(chunk).front());
  const auto& before = composed_.units.chunks.at(chunk - 1);
  mine.units.at(before.back()).gradient = std::exchange(first.input, {}).grad();
}

void RankActor::begin_message(const Instruction& message) {
  Instruction in_step = message;
  in_step.microbatch = in_batch(message.microbatch);
  const Wire wire = wire_of(composed_, in_step);
  const auto& units = composed_.units.chunks.at(message.chunk);
  Microbatch& mine = microbatches_.at(message.microbatch);
  Passed& first = mine.units.at(first_of(units));
  Passed& last = mine.units.at(units.back());
  Message& sent = messages_[{message.op, message.microbatch, message.chunk}];
  if (wire.sends) {
    sent.tensor = (wire.activations ? last.output.detach()
                                    : std::exchange(first.input, {}).grad())
                      .contiguous();
    sent.work = composed_.pipeline->send(sent.tensor, wire.peer, wire.tag);
    if (!last.keeps) last.output = at::Tensor();
  } else {
    sent.tensor = hidden();
    (wire.activations ? first.input : last.gradient) = sent.tensor;
    sent.work = composed_.pipeline->recv(sent.tensor, wire.peer, wire.tag);
  }
}

void RankActor::begin(const Instruction& instruction, bool awaited_next) {
  if (instruction.op == Op::kShareBatch) {
    if (!input_.next) return;
    return steps_->share.begin(input_.step + 1, steps_->extent,
                               reading_of(*input_.next), comm::Mode::kAsync);
  }
  if (!program::is_message(instruction.op)) {
    return ModelActor::begin(instruction, awaited_next);
  }
  begin_message(instruction);
}

void RankActor::await(const Instruction& instruction) {
  if (instruction.op == Op::kShareBatch) return steps_->share.await();
  if (!program::is_message(instruction.op)) {
    return ModelActor::await(instruction);
  }
  const auto found = messages_.find(
      {instruction.op, instruction.microbatch, instruction.chunk});
  found->second.work.wait();
  messages_.erase(found);
}

}  // namespace tessera::engine
