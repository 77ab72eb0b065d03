// Norms and activations for autograd, whose outputs a product need not keep:
// they are made again, with the same bits, from what these keep themselves.
//
// A product whose input is one of these outputs holds the node that made it,
// whose backward comes later: it still has what it kept.
// REQUIRES: that it has. A backward from the output alone that does not retain
//         its graph frees it: the product's own backward then fails.
// Second derivatives: of LayerNorm and Gelu; the others refuse.
// Memory: of a block of Llama a quarter less between forward and backward (two
//         of the width, one of the MLP's), for an output at a time meanwhile.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "tessera/nn/detail/one_pass.h"

namespace tessera::nn::detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x: (..., D), weight: (D) -> x / rms(x) * (offset + weight), (..., D).
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, double eps,
                            double offset = 0);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// The same beside x itself, to which something is added later: its gradient and
// the norm's are one sum.
class RmsNormBranch : public torch::autograd::Function<RmsNormBranch> {
 public:
  static constexpr uint32_t kNormed = 1;  // of the outputs
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& weight, double eps,
                               double offset = 0);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// x: (..., D), weight, bias: (D) -> (..., D).
class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const at::Tensor& bias,
                            double eps);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// The same beside x itself, as RmsNormBranch.
class LayerNormBranch : public torch::autograd::Function<LayerNormBranch> {
 public:
  static constexpr uint32_t kNormed = 1;  // of the outputs
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& weight, const at::Tensor& bias,
                               double eps);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// What a gate is made, times up, of one shape.
class Glu : public torch::autograd::Function<Glu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, Gate kind,
                            const at::Tensor& gate, const at::Tensor& up);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// GPT-2's, by tanh.
class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x);
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients);
  static at::Tensor again(const AutogradContext& ctx);
};

// What a product has of its input until its backward: x itself, or who makes it
// again. It is the first that is saved.
void keep_input(AutogradContext* ctx, variable_list& saved,
                const at::Tensor& x);
at::Tensor input_of(AutogradContext* ctx, const variable_list& saved);

}  // namespace tessera::nn::detail
