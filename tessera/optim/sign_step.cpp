#include "tessera/optim/sign_step.h"

#include <ATen/ATen.h>

namespace tessera::optim {
namespace {

void by_sign(const OptimizerConfig& /*config*/, const UpdateGroup& group) {
  update_in_passes(group, [](const UpdateGroup& plain) {
    for (size_t i = 0; i < plain.parameters.size(); ++i) {
      at::Tensor parameter = plain.parameters[i];
      parameter.sub_(plain.gradients[i].sign(), plain.lr);
    }
  });
}

}  // namespace

const UpdateRule& sign_step() {
  static const UpdateRule rule = {
      .name = "sign_step",
      .update = by_sign,
      .moments = {},
      .keys = {},
      .betas = {},
      .source = "Wang et al. 2024, arXiv 2408.15664",
      .by_sign = true};
  return rule;
}

}  // namespace tessera::optim
