#include "tessera/nn/weight_queue.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "tessera/core/log.h"
#include "tessera/nn/unwritten_gradients.h"

namespace tessera::nn {
namespace {

constexpr const char* kQueue = "weight_queue";

using Pointer = c10::intrusive_ptr<WeightQueue>;

// Of the forward that runs on this thread.
Pointer& current() {
  thread_local Pointer queue;
  return queue;
}

// Norms and biases are vectors, whose gradients cost nothing; of a matrix it is
// worth knowing.
void tell_of(const at::Tensor& parameter) {
  if (parameter.dim() < 2) return;
  static const bool told = [&] {
    log::debug("the gradient of a parameter of ", parameter.sizes(),
               " is made with that of its input: nothing puts it off");
    return true;
  }();
  static_cast<void>(told);
}

void add_to_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (parameter.grad().defined()) {
    fill_unwritten(parameter);
    parameter.grad().add_(gradient);
  } else {
    parameter.mutable_grad() = gradient;
  }
}

}  // namespace

WeightQueue::Scope::Scope(Pointer queue)
    : before_(std::exchange(current(), std::move(queue))) {}

WeightQueue::Scope::~Scope() { current() = std::move(before_); }

at::Tensor WeightQueue::put_off(const std::vector<at::Tensor>& ends,
                                const std::vector<at::Tensor>& gradients,
                                const at::Tensor& input,
                                const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> of = {input};
  of.insert(of.end(), parameters.begin(), parameters.end());
  is_open_ = true;
  const auto closes = c10::make_scope_exit([this] { is_open_ = false; });
  auto found = torch::autograd::grad(ends, of, gradients,
                                     /*retain_graph=*/false,
                                     /*create_graph=*/false,
                                     /*allow_unused=*/true);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!found[1 + i].defined()) continue;
    tell_of(parameters[i]);
    add([parameter = parameters[i], gradient = found[1 + i]] {
      add_to_gradient(parameter, gradient);
    });
  }
  return found[0];
}

// Each lets go of what it held at once.
void WeightQueue::run() {
  const at::NoGradGuard no_grad;
  for (auto& product : std::exchange(products_, {})) {
    std::exchange(product, nullptr)();
  }
}

void WeightQueue::remember(torch::autograd::AutogradContext* ctx) {
  if (!current()) return;
  ctx->saved_data[kQueue] = c10::IValue::make_capsule(current());
}

Pointer WeightQueue::open_for(torch::autograd::AutogradContext* ctx) {
  const auto found = ctx->saved_data.find(kQueue);
  if (found == ctx->saved_data.end()) return nullptr;
  auto queue = c10::static_intrusive_pointer_cast<WeightQueue>(
      found->second.toCapsule());
  return queue->is_open_ ? queue : nullptr;
}

void WeightQueue::add(std::function<void()> product) {
  TORCH_INTERNAL_ASSERT(is_open_);
  products_.push_back(std::move(product));
}

}  // namespace tessera::nn
