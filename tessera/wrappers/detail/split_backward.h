// A backward through any module in two parts, on autograd's own graph.
//
// First part:  the gradients of the module's inputs. Products of matrices and
//              convolutions leave their weights' gradients for later; what any
//              other operator gives its parameters is made by the way.
// Second part: the products left, and everything added to .grad. It holds,
//              of the graph, these products and what leads to parameters alone.
// Whole:       where the graph cannot be taken apart (a hook in its way would
//              run twice, no operator in it can wait, some output does not
//              depend on the inputs) the first part is the whole backward, and
//              the reason is said once.
// Twice:       a weight used twice has both its gradients.
// Source:      as torch.distributed.pipelining's stage_backward_input and
//              stage_backward_weight (Qi et al. 2023, arXiv 2401.10241: B and
//              W), which sum a weight used twice wrongly (pytorch#180952).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

namespace tessera::wrappers {

class PutOffGradients {
 public:
  // The second part, once. Adds to .grad of parameters.
  void run();

 private:
  friend PutOffGradients backward_to_inputs(
      const std::vector<at::Tensor>& ends,
      const std::vector<at::Tensor>& gradients,
      const std::vector<at::Tensor>& inputs);
  std::vector<torch::autograd::Edge> roots_;
  std::vector<at::Tensor> gradients_;
};

// The first part, from `ends`, whose gradients are these (undefined: 1), to
// `inputs`, leaves that require one, into their .grad. Nobody else may go
// backward through the same graph.
PutOffGradients backward_to_inputs(const std::vector<at::Tensor>& ends,
                                   const std::vector<at::Tensor>& gradients,
                                   const std::vector<at::Tensor>& inputs);

}  // namespace tessera::wrappers
