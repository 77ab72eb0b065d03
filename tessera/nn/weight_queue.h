// Gradients of weights that are left for later: a backward gives the gradients
// of inputs first, on which others wait, and those of weights when there is
// time.
//
// Use:    forwards inside of a Scope know the queue of that scope. A backward
//         of theirs inside of put_off() leaves products with dy to it, and
//         run() adds them to .grad later, in the order in which the backward
//         came to them: a weight that is used twice is added to twice.
// Memory: until run() it holds the input and dy of every product; an input that
//         would be made again (nn/detail/remade.h) is made when it is put off,
//         as what it is made from is not kept any longer.
// Threads: as autograd: a backward may run on a thread of its own.
// Source: Qi et al. 2023, arXiv 2401.10241.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <vector>

namespace tessera::nn {

class WeightQueue : public torch::CustomClassHolder {
 public:
  class Scope {
   public:
    explicit Scope(c10::intrusive_ptr<WeightQueue> queue);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    c10::intrusive_ptr<WeightQueue> before_;
  };

  // d(ends)/d(input) of `gradients`, as autograd::grad; what parameters get is
  // left to the queue, of those without a function that puts it off too: it is
  // made now, and only added later. Lets go of the graph.
  at::Tensor put_off(const std::vector<at::Tensor>& ends,
                     const std::vector<at::Tensor>& gradients,
                     const at::Tensor& input,
                     const std::vector<at::Tensor>& parameters);
  // Adds all of it, once.
  void run();

  // For functions of autograd. In forward: remembers the queue in whose scope
  // it is, if in one.
  static void remember(torch::autograd::AutogradContext* ctx);
  // In backward: the queue that is to have weights' gradients; null: none.
  static c10::intrusive_ptr<WeightQueue> open_for(
      torch::autograd::AutogradContext* ctx);
  // REQUIRES: is open. Runs without gradients being recorded.
  void add(std::function<void()> product);

 private:
  bool is_open_ = false;
  std::vector<std::function<void()>> products_;
};

}  // namespace tessera::nn
