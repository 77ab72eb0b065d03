#include "tessera/optim/sgd.h"

#include <ATen/ATen.h>

namespace tessera::optim {
namespace {

void by_libtorch(const OptimizerConfig& config, const UpdateGroup& group) {
  const std::vector<at::Tensor> momentum =
      group.moments.empty() ? std::vector<at::Tensor>() : group.moments[0];
  at::_fused_sgd_(group.parameters, group.gradients, momentum,
                  group.weight_decay, config.momentum, group.lr,
                  /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false);
}

}  // namespace

void sgd(const OptimizerConfig& config, const UpdateGroup& group) {
  update_in_passes(
      group, [&](const UpdateGroup& plain) { by_libtorch(config, plain); });
}

}  // namespace tessera::optim
