#include "tessera/optim/sgd.h"

#include <ATen/ATen.h>

#include <utility>

namespace tessera::optim {

Sgd::Sgd(std::vector<FlatSegment> segments, const SgdOptions& options)
    : Optimizer(std::move(segments)), options_(options) {
  if (options_.momentum != 0.0) momentum_ = add_state("momentum");
}

void Sgd::update(const Group& group, double lr) {
  const std::vector<at::Tensor> momentum =
      momentum_.empty() ? momentum_ : group.part_of(momentum_);
  at::_fused_sgd_(group.parameters, group.gradients, momentum,
                  group.decay ? options_.weight_decay : 0.0, options_.momentum,
                  lr, /*dampening=*/0.0, /*nesterov=*/false,
                  /*maximize=*/false, /*is_first_step=*/false);
}

}  // namespace tessera::optim
