// Adam with weight decay as a part of the loss, as PyTorch computes it:
//
//   g <- g + weight_decay p                           where the segment decays
//   m <- m + (1 - beta1)(g - m)          v <- beta2 v + (1 - beta2) g^2
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Its betas are its authors' 0.9 and 0.999 where optimizer.betas is left open.
// State:   "exp_avg.<parameter>" (m), "exp_avg_sq.<parameter>" (v), "step" (t).
// Kernel:  one pass over memory, that scales gradients and rounds copies too
//          (detail/adam_pass.h), on GPUs too but for fp16; elsewhere ATen's
//          fused one, between passes for these.
// Source:  Kingma and Ba 2015, arXiv 1412.6980.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

void adam(const OptimizerConfig& config, const UpdateGroup& group);
Pace adam_pace(const OptimizerConfig& config, const UpdateGroup& group);

}  // namespace tessera::optim
