#include "tessera/optim/adamw.h"

#include <ATen/ATen.h>

#include "tessera/optim/detail/adam_pass.h"

namespace tessera::optim {
namespace {

void by_libtorch(const OptimizerConfig& config, const UpdateGroup& group) {
  // The kernel reads t from a tensor beside each parameter.
  const std::vector<at::Tensor> step(
      group.parameters.size(),
      at::full({}, static_cast<double>(group.step),
               group.parameters.front().options().dtype(at::kFloat)));
  at::_fused_adamw_(group.parameters, group.gradients, group.moments[0],
                    group.moments[1], /*max_exp_avg_sqs=*/{}, step, group.lr,
                    config.betas[0], config.betas[1], group.weight_decay,
                    config.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace

void adamw(const OptimizerConfig& config, const UpdateGroup& group) {
  if (detail::runs_in_one_pass(group)) {
    return detail::adam_in_one_pass(config, group, detail::Decay::kDecoupled);
  }
  update_in_passes(
      group, [&](const UpdateGroup& plain) { by_libtorch(config, plain); });
}

Pace adamw_pace(const OptimizerConfig& config, const UpdateGroup& group) {
  return detail::pace_of(config, group, detail::Decay::kDecoupled);
}

}  // namespace tessera::optim
