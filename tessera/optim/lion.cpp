#include "tessera/optim/lion.h"

#include <ATen/ATen.h>

namespace tessera::optim {
namespace {

void by_operators(const OptimizerConfig& config, const UpdateGroup& group) {
  const double beta1 = config.betas[0], beta2 = config.betas[1];
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    at::Tensor parameter = group.parameters[i], momentum = group.moments[0][i];
    const at::Tensor& gradient = group.gradients[i];
    const at::Tensor update = momentum.lerp(gradient, 1.0 - beta1).sign_();
    if (group.weight_decay != 0.0) {
      parameter.mul_(1.0 - group.lr * group.weight_decay);
    }
    parameter.sub_(update, group.lr);
    momentum.lerp_(gradient, 1.0 - beta2);
  }
}

}  // namespace

void lion(const OptimizerConfig& config, const UpdateGroup& group) {
  update_in_passes(
      group, [&](const UpdateGroup& plain) { by_operators(config, plain); });
}

}  // namespace tessera::optim
