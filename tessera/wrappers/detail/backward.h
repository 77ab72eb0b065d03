// A backward that ranks end together, whether or not each of them has one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <vector>

namespace tessera::wrappers {

// Nothing where no tensor depends on a parameter, which LibTorch refuses: other
// ranks wait for what follows.
inline void run_backward(const std::vector<at::Tensor>& from,
                         const std::vector<at::Tensor>& gradients = {}) {
  const auto is_constant = [](const at::Tensor& each) {
    return each.defined() && !each.requires_grad();
  };
  if (std::ranges::all_of(from, is_constant)) return;
  torch::autograd::backward(from, gradients);
}

}  // namespace tessera::wrappers
