// torch::optim's Adam and AdamW, in one pass over memory a step: in the place
// of either, with the same options, states and files.
//
//   tessera::FusedAdamW optimizer(module->parameters(),
//                                 torch::optim::AdamWOptions(1e-3));
//
// Kernel:  optim/adamw.h's, on as many threads as LibTorch has. Where it does
//          not serve, the whole step is LibTorch's own: a parameter that is not
//          on the CPU, neither fp32 nor fp64, or not contiguous, and amsgrad.
// Numbers: LibTorch's to rounding; the same bits on any number of threads.
// Errors:  as the classes that they are.
// Source:  as PyTorch's fused=True, which LibTorch has not in C++.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace tessera {

class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
