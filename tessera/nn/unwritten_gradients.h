// Gradients of a new step, which count as zero though nobody filled them: who
// would be the first to add to one writes instead.
//
// Knows:   products and tables of this room (matmul.h, grouped_linear.h) and
//          weight queues; LibTorch's own accumulation, before which a hook
//          fills the gradient with zeros.
// For:     matrices and stacks of them. All else is filled at once, and so is
//          all with TESSERA_WITHOUT_KERNELS=gradient_in_place.
// Waits:   rows of small micro-batches, for those of others (waiting_rows.h).
// Memory:  a gradient is contiguous, and known by its address: it stays where
//          it is from begin() until it is whole: written, and nothing waits.
// Readers: complete() first, and so do those who write in another way.
// Threads: as backward of one model: one at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/nn/waiting_rows.h"

namespace tessera::nn {

class UnwrittenGradients {
 public:
  // gradients[i]: where that of parameters[i] lies. It may be the parameter's
  // .grad or not, as where there are several of a parameter. `batches`: of how
  // many micro-batches' products each is the sum.
  UnwrittenGradients(const std::vector<at::Tensor>& parameters,
                     std::vector<at::Tensor> gradients, int64_t batches = 1);
  ~UnwrittenGradients();
  UnwrittenGradients(const UnwrittenGradients&) = delete;
  UnwrittenGradients& operator=(const UnwrittenGradients&) = delete;

  // From here on all count as zero. `all`: the memory of all of them.
  void begin(const at::Tensor& all);
  // Zeros, where nobody has written since; and what waits is added.
  void complete();

 private:
  class Hook;
  struct Hooked {
    at::Tensor gradient;
    // Has the hook.
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    Hook* hook;
  };
  static Hook* hook_of(const at::Tensor& parameter);
  friend bool take_unwritten(const at::Tensor&);
  friend std::optional<Rows> rows_to_multiply(const at::Tensor&,
                                              const at::Tensor&,
                                              const at::Tensor&);
  friend bool is_of_unwritten(const torch::autograd::FunctionPreHook&);

  std::vector<at::Tensor> filled_;
  std::vector<Hooked> hooked_;
};

// Whether parameter.grad is unwritten; it is not from here on: the caller
// writes all of it.
bool take_unwritten(const at::Tensor& parameter);
// Of dy and x, whose dy^T x belongs into parameter.grad, what the caller is to
// multiply: these, or those of several micro-batches; nothing: they wait.
std::optional<Rows> rows_to_multiply(const at::Tensor& parameter,
                                     const at::Tensor& dy, const at::Tensor& x);
// Zeros in parameter.grad if it is unwritten.
void fill_unwritten(const at::Tensor& parameter);
// A hook that listens to nothing: it is one of those above.
bool is_of_unwritten(const torch::autograd::FunctionPreHook& hook);

}  // namespace tessera::nn
