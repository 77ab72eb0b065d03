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

at::Tensor Shape::empty() const { return at::empty(sizes, type); }

bool Shape::is_differentiable() const {
  return at::isFloatingType(type) || at::isComplexType(type);
}

std::string Shape::text() const {
  return c10::str(at::IntArrayRef(sizes), " of ", type);
}

Shapes Shapes::of(const Tensors& tensors) {
  Shapes shapes;
  for (const auto& each : tensors) shapes.all.push_back(Shape::of(each));
  return shapes;
}

at::Tensor Shapes::empty_message() {
  return at::zeros({1 + kMostTensors * (kMostDims + 2)}, at::kLong);
}

at::Tensor Shapes::to_message() const {
  TS_CHECK(std::ssize(all) <= kMostTensors, "pipeline: ", all.size(),
           " tensors between stages, ", kMostTensors, " at most. Join some.");
  at::Tensor message = empty_message();
  auto* to = message.mutable_data_ptr<int64_t>();
  *to++ = std::ssize(all);
  for (const Shape& each : all) {
    TS_CHECK(std::ssize(each.sizes) <= kMostDims, "pipeline: a tensor of ",
             each.sizes.size(), " dimensions between stages, ", kMostDims,
             " at most. Flatten some.");
    *to++ = static_cast<int64_t>(each.type);
    *to++ = std::ssize(each.sizes);
    to = std::ranges::copy(each.sizes, to).out;
  }
  return message;
}

Shapes Shapes::from_message(const at::Tensor& message) {
  const auto* from = message.const_data_ptr<int64_t>();
  Shapes shapes;
  for (int64_t left = *from++; left > 0; --left) {
    const auto type = static_cast<at::ScalarType>(*from++);
    const int64_t dims = *from++;
    shapes.all.push_back({{from, from + dims}, type});
    from += dims;
  }
  return shapes;
}

std::string Shapes::text() const {
  std::string text;
  for (const Shape& each : all) {
    text += (text.empty() ? "" : ", ") + each.text();
  }
  return text;
}

void StageActor::Message::wait() {
  if (header.defined()) header_work.wait();
  for (comm::Work& each : works) each.wait();
}

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
  for (const PipelineStage& stage : stages_) {
    const bool failed = went_back_[stage.index()] % options_.num_microbatches;
    if (stage.sharded() && failed) stage.sharded()->drop_accumulated();
  }
  went_back_.clear();
  loss_sum_ = 0;
  losses_ = 0;
  if (announces) {
    given_.clear();
    taken_.clear();
  }
}

Schedule::Result StageActor::end_program() {
  for (Message& each : sent_) each.wait();
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
  at(microbatch, 0).inputs = {part_of(inputs_, microbatch)};
}

void StageActor::forward(int64_t microbatch, int64_t unit) {
  const int64_t chunk = chunk_of(unit);
  Passed& here = at(microbatch, chunk);
  const bool is_first = pipeline_.is_first({ranks_.rank(), chunk});
  const at::AutoGradMode records(trains_);
  Tensors inputs;
  for (at::Tensor& each : here.inputs) {
    if (trains_ && !is_first && Shape::of(each).is_differentiable()) {
      each.requires_grad_();
    }
    inputs.push_back(Alias::apply(each));
  }
  const PipelineStage& stage = stages_[chunk];
  here.outputs = stage.forward(inputs);
  const bool is_last = pipeline_.is_last({ranks_.rank(), chunk});
  TS_CHECK(!is_last || here.outputs.size() == 1, "pipeline: the last stage, ",
           stage.index(), ", gave ", here.outputs.size(),
           " tensors. It gives one, of which the loss is taken.");
  for (const auto& each : here.outputs) {
    TS_CHECK(each.defined(), "pipeline: stage ", stage.index(),
             " gave no tensor.");
  }
  require_announced(here.outputs, chunk);
  if (!trains_) here.inputs.clear();
  if (is_last) outputs_[microbatch] = here.outputs[0].detach();
}

// The stages behind were told, and wait for just that.
void StageActor::require_announced(const Tensors& outputs, int64_t chunk) {
  const Shapes shapes = Shapes::of(outputs);
  const auto [known, is_new] = given_.try_emplace(chunk, shapes);
  TS_CHECK(is_new || known->second == shapes, "pipeline: stage ",
           stages_[chunk].index(), " gave ", shapes.text(),
           " for a micro-batch and announced ", known->second.text(),
           ". A stage gives the same shape for all micro-batches of one size.");
}

void StageActor::loss(int64_t microbatch) {
  if (!targets_.defined() || !options_.loss) return;
  Passed& here = at(microbatch, std::ssize(stages_) - 1);
  const at::AutoGradMode records(trains_);
  const at::Tensor loss =
      options_.loss(here.outputs[0], part_of(targets_, microbatch));
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
  const Starts from = take_starts(here);
  if (from.tensors.empty()) return;  // all is frozen
  Tensors inputs;
  for (const at::Tensor& each : here.inputs) {
    if (each.requires_grad()) inputs.push_back(each);
  }
  const PipelineStage& stage = stages_[chunk_of(unit)];
  if (part == Op::kBackwardInput && !inputs.empty() && !stage.sharded()) {
    here.later = backward_to_inputs(from.tensors, from.gradients, inputs);
  } else {
    go_back(stage, from);
  }
}

// Lets go of what a backward begins with.
StageActor::Starts StageActor::take_starts(Passed& here) {
  const Tensors outputs = std::exchange(here.outputs, {});
  const Tensors given = std::exchange(here.gradients, {});
  const at::Tensor loss = std::exchange(here.loss, {});
  Starts starts;
  const auto add = [&](const at::Tensor& from, const at::Tensor& gradient) {
    if (!from.requires_grad()) return;
    starts.tensors.push_back(from);
    starts.gradients.push_back(gradient);
  };
  if (loss.defined()) {
    add(loss, {});
    return starts;
  }
  size_t next = 0;
  for (const at::Tensor& each : outputs) {
    if (Shape::of(each).is_differentiable()) add(each, given.at(next++));
  }
  return starts;
}

// What is sharded reduces behind the last micro-batch.
void StageActor::go_back(const PipelineStage& stage, const Starts& from) {
  if (!stage.sharded()) {
    return torch::autograd::backward(from.tensors, from.gradients);
  }
  const int64_t count = ++went_back_[stage.index()];
  stage.sharded()->backward(from.tensors, from.gradients,
                            count == options_.num_microbatches);
}

// Zeros where the stage does not compute with an input.
Tensors StageActor::input_gradients(const Passed& here) {
  Tensors gradients;
  for (const at::Tensor& each : here.inputs) {
    if (!Shape::of(each).is_differentiable()) continue;
    const at::Tensor& gradient = each.grad();
    gradients.push_back(gradient.defined() ? gradient : at::zeros_like(each));
  }
  return gradients;
}

Ends StageActor::ends_of(const Instruction& message) const {
  return program::ends_of(message, ranks_.rank(), pipeline_.stages,
                          pipeline_.placement);
}

// Of the first of a message's tensors; the others follow.
int64_t StageActor::tag_of(const Instruction& message, const Ends& ends) const {
  const int64_t runs = pipeline_.num_runs();
  return ((message.microbatch * runs + ends.receiver) * 2 +
          (ends.activations ? 1 : 0)) *
         kMostTensors;
}

int64_t StageActor::header_tag(const Instruction& message,
                               const Ends& ends) const {
  const int64_t all = options_.num_microbatches * pipeline_.num_runs();
  return 2 * all * kMostTensors + tag_of(message, ends);
}

void StageActor::send(const Instruction& message, const Ends& ends,
                      Message& sent) {
  Passed& here = at(message.microbatch, message.chunk);
  const Tensors given = ends.activations ? here.outputs : input_gradients(here);
  for (const at::Tensor& each : given) {
    sent.tensors.push_back(each.detach().contiguous());
  }
  if (!ends.activations) here.inputs.clear();
  if (!trains_) here.outputs.clear();
  if (announces_ && ends.activations) {
    sent.header = Shapes::of(sent.tensors).to_message();
    sent.header_work =
        ranks_.send(sent.header, ends.peer_stage, header_tag(message, ends));
  }
  int64_t tag = tag_of(message, ends);
  for (const at::Tensor& each : sent.tensors) {
    sent.works.push_back(ranks_.send(each, ends.peer_stage, tag++));
  }
}

void StageActor::receive(const Instruction& message, const Ends& ends,
                         Message& received) {
  Passed& here = at(message.microbatch, message.chunk);
  const Shapes& shapes =
      ends.activations ? taken_.at(message.chunk) : given_.at(message.chunk);
  for (const Shape& each : shapes.all) {
    if (ends.activations || each.is_differentiable()) {
      received.tensors.push_back(each.empty());
    }
  }
  (ends.activations ? here.inputs : here.gradients) = received.tensors;
  int64_t tag = tag_of(message, ends);
  for (const at::Tensor& each : received.tensors) {
    received.works.push_back(ranks_.recv(each, ends.peer_stage, tag++));
  }
}

void StageActor::begin(const Instruction& message, bool /*awaited_next*/) {
  const Ends ends = ends_of(message);
  Message& here = messages_[{message.op, message.microbatch, message.chunk}];
  if (ends.sends) return send(message, ends, here);
  if (!announces_) return receive(message, ends, here);
  if (!ends.activations) return;
  here.header = Shapes::empty_message();
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
    taken_[message.chunk] = Shapes::from_message(here.header);
    here.header = at::Tensor();
  }
  if (announces_) receive(message, ends_of(message), here);
  here.wait();
}

void StageActor::hand_activations(int64_t microbatch, int64_t chunk) {
  Passed& here = at(microbatch, chunk);
  Tensors& inputs = at(microbatch, chunk + 1).inputs;
  for (const at::Tensor& each : here.outputs) inputs.push_back(each.detach());
  if (!trains_) here.outputs.clear();
}

void StageActor::hand_gradients(int64_t microbatch, int64_t chunk) {
  Passed& here = at(microbatch, chunk);
  at(microbatch, chunk - 1).gradients = input_gradients(here);
  here.inputs.clear();
}

}  // namespace tessera::wrappers
