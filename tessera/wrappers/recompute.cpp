#include "tessera/wrappers/recompute.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"

namespace tessera::wrappers {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// Where the default generators of these tensors' devices are.
class RandomState {
 public:
  explicit RandomState(const Tensors& tensors) {
    add(at::kCPU);
    for (const at::Tensor& each : tensors) {
      if (each.is_cuda()) add(each.device());
    }
  }
  void restore() const {
    for (Kept each : kept_) {
      const std::lock_guard lock(each.generator.mutex());
      each.generator.set_state(each.state);
    }
  }

 private:
  struct Kept {
    at::Generator generator;
    at::Tensor state;
  };
  void add(const at::Device& device) {
    for (const Kept& each : kept_) {
      if (each.generator.device() == device) return;
    }
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    kept_.push_back({generator, generator.get_state()});
  }

  std::vector<Kept> kept_;
};

struct Part : torch::CustomClassHolder {
  Part(TensorsFunction of, RandomState at_first)
      : forward(std::move(of)), random(std::move(at_first)) {}
  TensorsFunction forward;
  RandomState random;
};

// `anchor` requires a gradient, so that outputs do where no input does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static variable_list forward(AutogradContext* context,
                               const c10::intrusive_ptr<Part>& part,
                               const at::Tensor& /*anchor*/,
                               at::TensorList inputs) {
    context->saved_data["part"] = c10::IValue::make_capsule(part);
    context->save_for_backward(inputs.vec());
    context->set_materialize_grads(false);
    Tensors outputs = part->forward(inputs.vec());
    Tensors whole_numbers;
    for (const at::Tensor& each : outputs) {
      if (each.defined() &&
          !torch::autograd::isDifferentiableType(each.scalar_type())) {
        whole_numbers.push_back(each);
      }
    }
    context->mark_non_differentiable(whole_numbers);
    return outputs;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto capsule = context->saved_data["part"].toCapsule();
    const auto* part = static_cast<const Part*>(capsule.get());
    const variable_list saved = context->get_saved_variables();
    variable_list inputs;
    for (const at::Tensor& each : saved) {
      inputs.push_back(each.detach().requires_grad_(each.requires_grad()));
    }
    TS_CHECK(!at::GradMode::is_enabled(),
             "recompute(): a gradient that is itself to be differentiated "
             "(create_graph) knows nothing of how it was computed again. "
             "Compute that part without recompute().");
    const RandomState now(saved);
    part->random.restore();
    Tensors outputs;
    {
      const at::AutoGradMode records(true);
      const ForwardAgain forward_again;
      outputs = part->forward(inputs);
    }
    now.restore();
    variable_list from, with;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
      from.push_back(outputs[i]);
      with.push_back(gradients[i]);
    }
    outputs.clear();
    if (!from.empty()) torch::autograd::backward(from, with);
    variable_list given = {at::Tensor(), at::Tensor()};  // of part and anchor
    for (const at::Tensor& each : inputs) given.push_back(each.grad());
    return given;
  }
};

}  // namespace

Tensors recomputed(TensorsFunction forward, const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) return forward(inputs);
  // Autograd takes none that are undefined.
  Tensors defined;
  std::vector<bool> is_defined;
  for (const at::Tensor& each : inputs) {
    is_defined.push_back(each.defined());
    if (each.defined()) defined.push_back(each);
  }
  const auto with_all = [forward = std::move(forward),
                         is_defined](const Tensors& those) {
    Tensors all;
    auto next = those.begin();
    for (const bool is : is_defined) all.push_back(is ? *next++ : at::Tensor());
    return forward(all);
  };
  const auto part = c10::make_intrusive<Part>(with_all, RandomState(defined));
  return Recomputed::apply(part, at::empty({0}).requires_grad_(),
                           at::TensorList(defined));
}

}  // namespace tessera::wrappers
