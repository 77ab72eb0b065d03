#include "tessera/wrappers/detail/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera::wrappers {
namespace {

class ReadyHook : public torch::autograd::FunctionPostHook {
 public:
  explicit ReadyHook(std::function<void()> ready) : ready_(std::move(ready)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    ready_();
    return outputs;
  }

 private:
  std::function<void()> ready_;
};

}  // namespace

GradientHooks::~GradientHooks() {
  for (auto& hooked : hooks_) hooked.accumulator->del_post_hook(hooked.key);
}

void GradientHooks::add(const at::Tensor& parameter,
                        std::function<void()> ready) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const std::uintptr_t key =
      accumulator->add_post_hook(std::make_unique<ReadyHook>(std::move(ready)));
  hooks_.push_back({parameter, std::move(accumulator), key});
}

bool GradientHooks::are_heard() const {
  return std::ranges::all_of(hooks_, [](const Hooked& hooked) {
    return !hooked.parameter.requires_grad() ||
           torch::autograd::impl::grad_accumulator(hooked.parameter) ==
               hooked.accumulator;
  });
}

}  // namespace tessera::wrappers
