#include "tessera/engine/star_actor.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <string>
#include <utility>

#include "tessera/nn/loss.h"
#include "tessera/nn/parameter.h"

namespace tessera::engine {

StarActor::StarActor(std::vector<std::shared_ptr<models::Model>> models,
                     parallel::Composed& composed, optim::Optimizer* optimizer,
                     comm::Group& world, const GradientRules& rules)
    : ModelActor(composed, optimizer, world, rules),
      models_(std::move(models)),
      replicas_({models_.begin(), models_.end()},
                std::vector<at::Device>(models_.size(), at::kCPU)) {
  if (optimizer == nullptr) return;
  // Of the types that device 0 has them in.
  std::map<std::string, at::ScalarType> types;
  for (const auto& parameter : composed.parameters->trained()) {
    types[parameter.name] = parameter.gradient.scalar_type();
  }
  gradients_.resize(models_.size());
  for (size_t device = 1; device < models_.size(); ++device) {
    std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
    for (const auto& parameter : nn::parameters_of(*models_[device])) {
      const auto found = types.find(parameter.name);
      if (found == types.end()) continue;  // frozen
      by_type[found->second].push_back(parameter.tensor);
    }
    for (auto& [type, parameters] : by_type) {
      gradients_[device].emplace_back(std::move(parameters), type, /*extra=*/0,
                                      /*group=*/nullptr);
    }
  }
}

// Device 0 is the busiest: what it sends and receives.
Traffic StarActor::so_far() const {
  const auto& first = replicas_.traffic()[0];
  return {.seconds = replicas_.star_seconds(),
          .bytes = first.model_in + first.model_out + first.batch_in +
                   first.batch_out};
}

Traffic StarActor::traffic() const { return so_far() - before_; }

void StarActor::begin_program(StepInput input, int64_t num_microbatches,
                              program::Purpose purpose,
                              std::optional<StepInput> next) {
  ModelActor::begin_program(std::move(input), num_microbatches, purpose,
                            std::move(next));
  before_ = so_far();
  devices_.assign(trains() ? models_.size() : 1, {});
}

void StarActor::on_devices(const std::function<void(size_t)>& work) {
  replicas_.run(devices_.size(), work);
}

void StarActor::replicate_parameters() { replicas_.replicate(); }

void StarActor::zero_gradients() {
  ModelActor::zero_gradients();
  on_devices([&](size_t device) {
    for (comm::FlatGradients& each : gradients_[device]) each.zero();
  });
}

void StarActor::load_inputs(int64_t microbatch) {
  for (size_t device = 0; device < devices_.size(); ++device) {
    auto& batch = devices_[device].batch;
    batch = input_.read.load(static_cast<int64_t>(device), microbatch);
    replicas_.count_batch(0, device, batch.inputs);
  }
}

void StarActor::load_targets(int64_t /*microbatch*/) {
  for (size_t device = 0; device < devices_.size(); ++device) {
    replicas_.count_batch(0, device, devices_[device].batch.targets);
  }
}

void StarActor::forward(int64_t microbatch, int64_t /*unit*/) {
  on_devices([&](size_t device) {
    Device& here = devices_[device];
    const at::AutoGradMode records(trains());
    const models::Tokens tokens{
        .length = here.batch.inputs.size(1),
        .document_starts = here.batch.document_starts,
        .draw = draw_of(static_cast<int64_t>(device), microbatch),
        .drops_none = static_cast<bool>(input_.on_logits)};
    at::Tensor x = here.batch.inputs;
    here.balance = {};
    for (int64_t unit = 0; unit < models_[device]->num_units(); ++unit) {
      x = models_[device]->forward_unit(unit, x, tokens,
                                        trains() ? &here.balance : nullptr);
    }
    here.output = std::move(x);
  });
}

void StarActor::loss(int64_t microbatch) {
  on_devices([&](size_t device) {
    Device& here = devices_[device];
    const models::Model& model = *models_[device];
    const at::NoGradGuard no_grad;
    const at::Tensor hidden = here.output.detach();
    if (!trains()) here.output = at::Tensor();
    if (input_.on_logits) input_.on_logits(model.logits_of(hidden));
    here.loss =
        model.loss_of(hidden, here.batch.targets, gradient_factor(microbatch));
    if (trains()) here.gradient = hidden;
  });
  for (const Device& here : devices_) count(here.loss, microbatch);
  if (!trains()) return;
  for (const Device& here : devices_) count(here.balance, microbatch);
}

void StarActor::backward(program::Op /*part*/, int64_t /*microbatch*/,
                         int64_t /*unit*/) {
  on_devices([&](size_t device) {
    Device& here = devices_[device];
    std::vector<at::Tensor> ends = {std::exchange(here.output, {})};
    std::vector<at::Tensor> gradients = {std::exchange(here.gradient, {})};
    const at::Tensor& penalty = here.balance.penalty;
    if (penalty.defined() && penalty.requires_grad()) {
      ends.push_back(penalty * input_.aux_scale);
      gradients.emplace_back();
    }
    torch::autograd::backward(ends, gradients);
  });
}

void StarActor::reduce_replicas() {
  composed_.parameters->complete_gradients();
  replicas_.reduce_gradients();
}

}  // namespace tessera::engine
