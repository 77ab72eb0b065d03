// The products of Linear with a parameter that is heard, by nn/matmul.h where
// that gains: fp32, and bf16 on processors that do not multiply it. Gradients
// of weights are then added up where they lie. All others, and those that are
// small, keep LibTorch's bits.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::wrappers {

// Computes what `op` would, of arguments as Linear and at::linear give them:
// takes these from the stack and puts the result there; or leaves the stack
// alone and returns false.
bool run_product(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// An operator's argument, as addmm's beta and alpha.
bool is_one(const c10::IValue& scalar);

// at::linear(), by the same choice. bias may be undefined.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& bias = {});

}  // namespace tessera::wrappers
