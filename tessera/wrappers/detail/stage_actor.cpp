#include "tessera/wrappers/detail/stage_actor.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::wrappers {

using program::Ends;
using program::Instruction;
using program::Op;

namespace {

constexpr int64_t kMostDims = 12;

// Autograd's own copy of a leaf, in the same memory: a stage may begin with
// what computes in place.
struct Alias : torch::autograd::Function<Alias> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                            const at::Tensor& x) {
    return x.detach();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list gradients) {
    return gradients;
  }
};

}  // namespace

Shape Shape::of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.scalar_type()};
}

at::Tensor Shape::empty_message() {
  return at::zeros({kMostDims + 2}, at::kLong);
}

at::Tensor Shape::to_message() const {
  TS_CHECK(std::ssize(sizes) <= kMostDims, "pipeline: a tensor of ",
           sizes.size(), " dimensions between stages, ", kMostDims,
           " at most. Flatten some.");
  at::Tensor message = empty_message();
  auto* to = message.mutable_data_ptr<int64_t>();
  *to++ = static_cast<int64_t>(type);
  *to++ = std::ssize(sizes);
  std::ranges::copy(sizes, to);
  return message;
}

Shape Shape::from_message(const at::Tensor& message) {
  const auto* from = message.const_data_ptr<int64_t>();
  const auto type = static_cast<at::ScalarType>(from[0]);
  return {{from + 2, from + 2 + from[1]}, type};
}

at::Tensor Shape::empty() const { return at::empty(sizes, type); }

StageActor::StageActor(const std::vector<PipelineStage>& stages,
                       const program::Pipeline& pipeline, comm::Group& ranks,
                       const ScheduleOptions& options)
    : stages_(stages), pipeline_(pipeline), ranks_(ranks), options_(options) {}

void StageActor::begin_program(const at::Tensor& inputs,
                               const at::Tensor& targets, bool trains,
                               bool announces) {
  inputs_ = inputs;
  targets_ = targets;
  trains_ = trains;
  announces_ = announces;
  // Of a program that ended with an exception.
  passed_.clear();
  messages_.clear();
  sent_.clear();
  outputs_.clear();
  went_back_.clear();
  loss_sum_ = 0;
  losses_ = 0;
  if (announces) {
    given_.clear();
    taken_.clear();
  }
}

Schedule::Result StageActor::end_program() {
  for (Message& each : sent_) {
    each.header_work.wait();
    each.work.wait();
  }
  sent_.clear();
  passed_.clear();
  Schedule::Result result;
  std::vector<at::Tensor> outputs;
  for (auto& [microbatch, each] : std::exchange(outputs_, {})) {
    outputs.push_back(each);
  }
  if (!outputs.empty()) result.output = at::cat(outputs);
  const double sum = std::exchange(loss_sum_, 0);
  const auto count = static_cast<double>(std::exchange(losses_, 0));
  result.loss =
      count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
  inputs_ = targets_ = at::Tensor();
  return result;
}

at::Tensor StageActor::part_of(const at::Tensor& batch,
                               int64_t microbatch) const {
  const int64_t rows = batch.size(0) / options_.num_microbatches;
  return batch.narrow(0, microbatch * rows, rows);
}

void StageActor::load_inputs(int64_t microbatch) {
  at(microbatch, 0).input = part_of(inputs_, microbatch);
}

void StageActor::forward(int64_t microbatch, int64_t unit) {
  const int64_t chunk = chunk_of(unit);
  Passed& here = at(microbatch, chunk);
  const bool is_first = pipeline_.is_first({ranks_.rank(), chunk});
  const at::AutoGradMode records(trains_);
  const at::ScalarType type = here.input.scalar_type();
  if (trains_ && !is_first &&
      (at::isFloatingType(type) || at::isComplexType(type))) {
    here.input.requires_grad_();
  }
  here.output = stages_[chunk].forward(Alias::apply(here.input));
  TS_CHECK(here.output.defined(), "pipeline: stage ", stages_[chunk].index(),
           " gave no tensor.");
  require_announced(here.output, chunk);
  if (!trains_) here.input = at::Tensor();
  if (!pipeline_.is_last({ranks_.rank(), chunk})) return;
  outputs_[microbatch] = here.output.detach();
}

// The stages behind were told, and wait for just that.
void StageActor::require_announced(const at::Tensor& output, int64_t chunk) {
  const Shape shape = Shape::of(output);
  const auto [known, is_new] = given_.try_emplace(chunk, shape);
  TS_CHECK(is_new || known->second == shape, "pipeline: stage ",
           stages_[chunk].index(), " gave ", at::IntArrayRef(shape.sizes),
           " of ", shape.type, " for a micro-batch and announced ",
           at::IntArrayRef(known->second.sizes), " of ", known->second.type,
           ". A stage gives the same shape for all micro-batches of one size.");
}

void StageActor::loss(int64_t microbatch) {
  if (!targets_.defined() || !options_.loss) return;
  Passed& here = at(microbatch, std::ssize(stages_) - 1);
  const at::AutoGradMode records(trains_);
  const at::Tensor loss =
      options_.loss(here.output, part_of(targets_, microbatch));
  TS_CHECK(loss.defined() && loss.numel() == 1,
           "pipeline: the loss of a micro-batch is to be one number.");
  loss_sum_ += loss.item<double>();
  ++losses_;
  here.loss = loss / static_cast<double>(options_.num_microbatches);
}

void StageActor::backward(Op part, int64_t microbatch, int64_t unit) {
  Passed& here = at(microbatch, chunk_of(unit));
  if (part == Op::kBackwardWeight && here.later) {
    std::exchange(here.later, {})->run();
    return;
  }
  const at::Tensor output = std::exchange(here.output, {});
  const at::Tensor loss = std::exchange(here.loss, {});
  const at::Tensor gradient = std::exchange(here.gradient, {});
  const at::Tensor& end = loss.defined() ? loss : output;
  if (!end.defined() || !end.requires_grad()) return;  // all is frozen
  const PipelineStage& stage = stages_[chunk_of(unit)];
  if (part == Op::kBackwardInput && here.input.requires_grad() &&
      !stage.sharded()) {
    here.later = backward_to_input(end, gradient, here.input);
  } else {
    go_back(stage, end, gradient);
  }
}

// What is sharded reduces behind the last micro-batch.
void StageActor::go_back(const PipelineStage& stage, const at::Tensor& end,
                         const at::Tensor& gradient) {
  if (!stage.sharded()) return torch::autograd::backward({end}, {gradient});
  const int64_t count = ++went_back_[stage.index()];
  stage.sharded()->backward(end, gradient, count == options_.num_microbatches);
}

// Zeros where the stage does not compute with its input.
at::Tensor StageActor::input_gradient(const Passed& here) const {
  const at::Tensor& gradient = here.input.grad();
  return gradient.defined() ? gradient : at::zeros_like(here.input);
}

Ends StageActor::ends_of(const Instruction& message) const {
  return program::ends_of(message, ranks_.rank(), pipeline_.stages,
                          pipeline_.placement);
}

int64_t StageActor::tag_of(const Instruction& message, const Ends& ends) const {
  const int64_t runs = pipeline_.num_runs();
  return (message.microbatch * runs + ends.receiver) * 2 +
         (ends.activations ? 1 : 0);
}

int64_t StageActor::header_tag(const Instruction& message,
                               const Ends& ends) const {
  const int64_t all = options_.num_microbatches * pipeline_.num_runs();
  return 2 * all + tag_of(message, ends);
}

void StageActor::send(const Instruction& message, const Ends& ends,
                      Message& sent) {
  Passed& here = at(message.microbatch, message.chunk);
  sent.tensor = (ends.activations ? here.output.detach() : input_gradient(here))
                    .contiguous();
  if (!ends.activations) here.input = at::Tensor();
  if (!trains_) here.output = at::Tensor();
  if (announces_ && ends.activations) {
    sent.header = Shape::of(sent.tensor).to_message();
    sent.header_work =
        ranks_.send(sent.header, ends.peer_stage, header_tag(message, ends));
  }
  sent.work = ranks_.send(sent.tensor, ends.peer_stage, tag_of(message, ends));
}

void StageActor::receive(const Instruction& message, const Ends& ends,
                         Message& received) {
  Passed& here = at(message.microbatch, message.chunk);
  if (ends.activations) {
    here.input = taken_.at(message.chunk).empty();
    received.tensor = here.input;
  } else {
    here.gradient = given_.at(message.chunk).empty();
    received.tensor = here.gradient;
  }
  received.work =
      ranks_.recv(received.tensor, ends.peer_stage, tag_of(message, ends));
}

void StageActor::begin(const Instruction& message, bool /*awaited_next*/) {
  const Ends ends = ends_of(message);
  Message& here = messages_[{message.op, message.microbatch, message.chunk}];
  if (ends.sends) return send(message, ends, here);
  if (!announces_) return receive(message, ends, here);
  if (!ends.activations) return;
  here.header = Shape::empty_message();
  here.header_work =
      ranks_.recv(here.header, ends.peer_stage, header_tag(message, ends));
}

// While shapes are announced a receive is posted here: no send is waited for.
void StageActor::await(const Instruction& message) {
  const auto found =
      messages_.find({message.op, message.microbatch, message.chunk});
  Message here = std::move(found->second);
  messages_.erase(found);
  if (announces_ && program::is_send(message.op)) {
    sent_.push_back(std::move(here));
    return;
  }
  if (here.header.defined()) {
    here.header_work.synchronize();
    taken_[message.chunk] = Shape::from_message(here.header);
  }
  if (announces_) receive(message, ends_of(message), here);
  here.work.wait();
}

void StageActor::hand_activations(int64_t microbatch, int64_t chunk) {
  Passed& here = at(microbatch, chunk);
  at(microbatch, chunk + 1).input = here.output.detach();
  if (!trains_) here.output = at::Tensor();
}

void StageActor::hand_gradients(int64_t microbatch, int64_t chunk) {
  Passed& here = at(microbatch, chunk);
  at(microbatch, chunk - 1).gradient = input_gradient(here);
  here.input = at::Tensor();
}

}  // namespace tessera::wrappers
