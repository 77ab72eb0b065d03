// The core of attention - scores, softmax, values - of which q, k and v alone
// are kept from forward to backward, and all else is computed again from them.
//
//   y = again.forward(core, q, k, v);  // as core(q, k, v)
//   z = linear(y);                     // which keeps y for its own backward
//   again.let_go();                    // of y's memory
//   ...
//   again.compute();                   // the core, and y's memory, once more
//   torch::autograd::backward({z}, ...);
//
// Memory: y is whole where it is read: in the forward, and from compute() on;
//         between let_go() and compute() its storage is empty.
// Bits:   those of core(q, k, v), forward and backward.
// Comm:   that of the core, once more.
// Threads: as a tensor.
// Source: Korthikanti et al. 2022, arXiv 2205.05198 (selective recomputation).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace tessera::nn {

class CoreAgain {
 public:
  // Gives a contiguous tensor, of its own memory.
  using Core = std::function<at::Tensor(
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
  at::Tensor forward(Core core, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v);
  void let_go();
  // What it made belongs to the backward alone, and goes with it.
  // REQUIRES: let_go(), once.
  void compute();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::nn
