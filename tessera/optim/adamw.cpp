#include "tessera/optim/adamw.h"

#include <ATen/ATen.h>

#include <utility>

namespace tessera::optim {

AdamW::AdamW(std::vector<FlatSegment> segments, const AdamWOptions& options)
    : Optimizer(std::move(segments)),
      options_(options),
      exp_avg_(add_state("exp_avg")),
      exp_avg_sq_(add_state("exp_avg_sq")) {}

void AdamW::update(const Group& group, double lr) {
  // The kernel reads t from a tensor beside each parameter.
  const std::vector<at::Tensor> step(
      group.segments.size(),
      at::full({}, static_cast<double>(steps()),
               group.parameters.front().options().dtype(at::kFloat)));
  at::_fused_adamw_(group.parameters, group.gradients, group.part_of(exp_avg_),
                    group.part_of(exp_avg_sq_), /*max_exp_avg_sqs=*/{}, step,
                    lr, options_.beta1, options_.beta2,
                    group.decay ? options_.weight_decay : 0.0, options_.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::optim
