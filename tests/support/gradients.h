// Gradients beside differences, for modules of any kind.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/nn/parameter.h"

namespace tessera::nn {

inline const auto kWide = at::TensorOptions().dtype(at::kDouble);

using Function = std::function<at::Tensor()>;

// Compares d sum(f * weight) / d input with central differences.
inline void expect_gradient(const Function& f, at::Tensor input) {
  const at::Tensor weight = at::randn_like(f()).detach();
  const at::Tensor gradient =
      torch::autograd::grad({(f() * weight).sum()}, {input})[0];
  const at::NoGradGuard no_grad;
  const auto value = [&] { return (f() * weight).sum().item<double>(); };
  constexpr double kStep = 1e-6;
  double* x = input.data_ptr<double>();
  const at::Tensor flat = gradient.contiguous().view({-1});
  for (int64_t i = 0; i < input.numel(); ++i) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = value();
    x[i] = kept - kStep;
    const double below = value();
    x[i] = kept;
    EXPECT_NEAR(flat[i].item<double>(), (above - below) / (2 * kStep), 1e-6)
        << "element " << i;
  }
}

inline void expect_all_gradients(torch::nn::Module& module, const Function& f,
                                 const at::Tensor& input) {
  expect_gradient(f, input);
  for (const auto& parameter : parameters_of(module)) {
    SCOPED_TRACE(parameter.name);
    expect_gradient(f, parameter.tensor);
  }
}

// Far from what it begins as.
template <typename T>
void fill(T& module, uint64_t seed = 7) {
  materialise(module, {.seed = seed, .dtype = at::kDouble});
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_of(module)) {
    parameter.tensor.add_(at::randn_like(parameter.tensor), 0.3);
  }
}

// In double precision, with a gradient.
inline at::Tensor input(std::vector<int64_t> shape) {
  return at::randn(shape, kWide).requires_grad_();
}

}  // namespace tessera::nn
