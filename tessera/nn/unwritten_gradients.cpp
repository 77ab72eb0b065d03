#include "tessera/nn/unwritten_gradients.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "tessera/nn/kernel_choice.h"

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
  explicit Hook(at::Tensor parameter) : parameter_(std::move(parameter)) {}

  // By memory: .grad may be another tensor of it meanwhile.
  void mark(const void* memory) { unwritten_ = memory; }
  bool take(const at::Tensor& gradient) {
    if (unwritten_ == nullptr || !gradient.defined() ||
        gradient.const_data_ptr() != unwritten_) {
      return false;
    }
    unwritten_ = nullptr;
    return true;
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
  const void* unwritten_ = nullptr;
};

UnwrittenGradients::UnwrittenGradients(
    const std::vector<at::Tensor>& parameters,
    std::vector<at::Tensor> gradients) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!may_be_unwritten(parameters[i])) {
      filled_.push_back(std::move(gradients[i]));
      continue;
    }
    auto accumulator = impl::grad_accumulator(parameters[i]);
    auto hook = std::make_unique<Hook>(parameters[i]);
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
    each.hook->mark(each.gradient.const_data_ptr());
  }
}

void UnwrittenGradients::fill() {
  const at::NoGradGuard no_grad;
  for (const Hooked& each : hooked_) {
    if (each.hook->take(each.gradient)) each.gradient.zero_();
  }
}

bool is_of_unwritten(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const UnwrittenGradients::Hook*>(&hook) != nullptr;
}

bool take_unwritten(const at::Tensor& parameter) {
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return false;
  return std::ranges::any_of(accumulator->pre_hooks(), [&](const auto& each) {
    auto* const hook = dynamic_cast<UnwrittenGradients::Hook*>(each.get());
    return hook != nullptr && hook->take(parameter.grad());
  });
}

void fill_unwritten(const at::Tensor& parameter) {
  if (take_unwritten(parameter)) parameter.mutable_grad().zero_();
}

}  // namespace tessera::nn
