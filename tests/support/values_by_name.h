// Values of parameters that another program, in another language, gives its own
// alike: tests/parity has it as number and name say.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

namespace tessera::tests {

// Of the n-th parameter by name, element i is sin(0.37 i + 1.3 n) / 20, and one
// more in weights of norms.
inline void give_values_by_name(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> sorted;
  for (const auto& each : module.named_parameters()) {
    sorted[each.key()] = each.value();
  }
  double number = 0;
  for (auto& [name, parameter] : sorted) {
    const bool is_norm = name.find("norm.weight") != std::string::npos;
    parameter.copy_(at::arange(parameter.numel(), at::kDouble)
                        .mul(0.37)
                        .add(1.3 * number++)
                        .sin()
                        .mul(0.05)
                        .add(is_norm ? 1.0 : 0.0)
                        .view(parameter.sizes()));
  }
}

}  // namespace tessera::tests
