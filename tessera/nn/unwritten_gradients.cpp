#include "tessera/nn/unwritten_gradients.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"

namespace tessera::nn {
namespace {

namespace impl = torch::autograd::impl;

bool may_be_unwritten(const at::Tensor& parameter) {
  return parameter.dim() >= 2 && parameter.is_leaf() &&
         parameter.requires_grad() && uses(Kernel::kGradientInPlace);
}

}  // namespace

// On a parameter's accumulator, where whoever adds to .grad finds it.
class UnwrittenGradients::Hook final : public torch::autograd::FunctionPreHook {
 public:
  Hook(at::Tensor parameter, int64_t batches)
      : parameter_(std::move(parameter)), waiting_(batches) {}

  // By memory: .grad may be another tensor of it meanwhile. Null: none.
  void mark(const void* memory) {
    memory_ = memory;
    is_unwritten_ = memory != nullptr;
    waiting_.reset();
  }
  bool is_of(const at::Tensor& gradient) const {
    return memory_ != nullptr && gradient.defined() &&
           gradient.const_data_ptr() == memory_;
  }
  bool take(const at::Tensor& gradient) {
    return is_of(gradient) && std::exchange(is_unwritten_, false);
  }
  WaitingRows& waiting() { return waiting_; }

  void complete(const at::Tensor& gradient) {
    const auto rows = waiting_.take();
    const bool is_unwritten = take(gradient);
    if (rows) {
      gradient_into(gradient, rows->dy, rows->x, /*adds=*/!is_unwritten);
    } else if (is_unwritten) {
      gradient.zero_();
    }
  }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (gradients[0].defined() && take(parameter_.grad())) {
      parameter_.mutable_grad().zero_();
    }
    return gradients;
  }

 private:
  at::Tensor parameter_;
  const void* memory_ = nullptr;
  bool is_unwritten_ = false;
  WaitingRows waiting_;
};

UnwrittenGradients::UnwrittenGradients(
    const std::vector<at::Tensor>& parameters,
    std::vector<at::Tensor> gradients, int64_t batches) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!may_be_unwritten(parameters[i])) {
      filled_.push_back(std::move(gradients[i]));
      continue;
    }
    auto accumulator = impl::grad_accumulator(parameters[i]);
    auto hook = std::make_unique<Hook>(parameters[i], batches);
    Hook* const found = hook.get();
    accumulator->add_pre_hook(std::move(hook));
    hooked_.push_back({std::move(gradients[i]), std::move(accumulator), found});
  }
}

// A graph may keep the accumulators.
UnwrittenGradients::~UnwrittenGradients() {
  for (const Hooked& each : hooked_) each.hook->mark(nullptr);
}

void UnwrittenGradients::begin(const at::Tensor& all) {
  const at::NoGradGuard no_grad;
  if (hooked_.empty()) {
    all.zero_();
    return;
  }
  for (const at::Tensor& gradient : filled_) gradient.zero_();
  for (const Hooked& each : hooked_) {
    // Where another gradient of it was freed, its memory may be this one's now.
    for (const auto& other : each.accumulator->pre_hooks()) {
      auto* const hook = dynamic_cast<Hook*>(other.get());
      if (hook != nullptr && hook->is_of(each.gradient)) hook->mark(nullptr);
    }
    each.hook->mark(each.gradient.const_data_ptr());
  }
}

void UnwrittenGradients::complete() {
  const at::NoGradGuard no_grad;
  for (const Hooked& each : hooked_) each.hook->complete(each.gradient);
}

bool is_of_unwritten(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const UnwrittenGradients::Hook*>(&hook) != nullptr;
}

UnwrittenGradients::Hook* UnwrittenGradients::hook_of(
    const at::Tensor& parameter) {
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return nullptr;
  for (const auto& each : accumulator->pre_hooks()) {
    auto* const hook = dynamic_cast<Hook*>(each.get());
    if (hook != nullptr && hook->is_of(parameter.grad())) return hook;
  }
  return nullptr;
}

bool take_unwritten(const at::Tensor& parameter) {
  auto* const hook = UnwrittenGradients::hook_of(parameter);
  return hook != nullptr && hook->take(parameter.grad());
}

std::optional<Rows> rows_to_multiply(const at::Tensor& parameter,
                                     const at::Tensor& dy,
                                     const at::Tensor& x) {
  auto* const hook = UnwrittenGradients::hook_of(parameter);
  return hook == nullptr ? Rows{dy, x} : hook->waiting().add(dy, x);
}

void fill_unwritten(const at::Tensor& parameter) {
  if (take_unwritten(parameter)) parameter.mutable_grad().zero_();
}

}  // namespace tessera::nn
