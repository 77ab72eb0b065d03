#include "tessera/optim/adam.h"

#include <ATen/ATen.h>

namespace tessera::optim {

void adam(const OptimizerConfig& config, const UpdateGroup& group) {
  // The kernel reads t from a tensor beside each parameter.
  const std::vector<at::Tensor> step(
      group.parameters.size(),
      at::full({}, static_cast<double>(group.step),
               group.parameters.front().options().dtype(at::kFloat)));
  at::_fused_adam_(group.parameters, group.gradients, group.moments[0],
                   group.moments[1], /*max_exp_avg_sqs=*/{}, step, group.lr,
                   config.betas[0], config.betas[1], group.weight_decay,
                   config.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::optim
