// Tells when a parameter's gradient has been accumulated, once a backward.
//
// Threads: hooks run in the thread that runs backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::wrappers {

class GradientHooks {
 public:
  GradientHooks() = default;
  // Takes the hooks away.
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  void add(const at::Tensor& parameter, std::function<void()> ready);
  // False where a parameter has lost its hook: autograd begins anew with one
  // that gets another dtype or device.
  bool are_heard() const;

 private:
  struct Hooked {
    at::Tensor parameter;
    // Kept alive: it owns the hook. (Its pointer type differs by version.)
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    std::uintptr_t key = 0;
  };
  std::vector<Hooked> hooks_;
};

}  // namespace tessera::wrappers
