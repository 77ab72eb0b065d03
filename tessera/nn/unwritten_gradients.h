// Gradients of a new step, which count as zero though nobody filled them: who
// would be the first to add to one writes instead.
//
// Knows:   products and tables of this room (matmul.h, grouped_linear.h) and
//          weight queues; LibTorch's own accumulation, before which a hook
//          fills the gradient with zeros.
// For:     matrices and stacks of them. All else is filled at once, and so is
//          all with TESSERA_WITHOUT_KERNELS=gradient_in_place.
// Memory:  a gradient is contiguous, and known by its address: it stays where
//          it is from begin() until it is written or filled.
// Readers: fill() first.
// Threads: as backward of one model: one at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace tessera::nn {

class UnwrittenGradients {
 public:
  // gradients[i]: where that of parameters[i] lies. It may be the parameter's
  // .grad or not, as where there are several of a parameter.
  UnwrittenGradients(const std::vector<at::Tensor>& parameters,
                     std::vector<at::Tensor> gradients);
  ~UnwrittenGradients();
  UnwrittenGradients(const UnwrittenGradients&) = delete;
  UnwrittenGradients& operator=(const UnwrittenGradients&) = delete;

  // From here on all count as zero. `all`: the memory of all of them.
  void begin(const at::Tensor& all);
  // Zeros, where nobody has written since.
  void fill();

 private:
  class Hook;
  struct Hooked {
    at::Tensor gradient;
    // Has the hook.
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    Hook* hook;
  };
  friend bool take_unwritten(const at::Tensor&);
  friend bool is_of_unwritten(const torch::autograd::FunctionPreHook&);

  std::vector<at::Tensor> filled_;
  std::vector<Hooked> hooked_;
};

// Whether parameter.grad is unwritten; it is not from here on: the caller
// writes all of it.
bool take_unwritten(const at::Tensor& parameter);
// Zeros in parameter.grad if it is.
void fill_unwritten(const at::Tensor& parameter);
// A hook that listens to nothing: it is one of those above.
bool is_of_unwritten(const torch::autograd::FunctionPreHook& hook);

}  // namespace tessera::nn
