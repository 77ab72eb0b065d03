// Adam with decoupled weight decay, as PyTorch computes it:
//
//   p <- p (1 - lr weight_decay)                      where the segment decays
//   m <- m + (1 - beta1)(g - m)          v <- beta2 v + (1 - beta2) g^2
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Its betas are 0.9 and 0.95 where optimizer.betas is left open.
// State:   "exp_avg.<parameter>" (m), "exp_avg_sq.<parameter>" (v), "step" (t).
// Kernel:  one pass over memory, that scales gradients and rounds copies too
//          (detail/adam_pass.h), on GPUs too but for fp16; elsewhere ATen's
//          fused one, between passes for these.
// Source:  Loshchilov and Hutter 2019, arXiv 1711.05101.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

void adamw(const OptimizerConfig& config, const UpdateGroup& group);
Pace adamw_pace(const OptimizerConfig& config, const UpdateGroup& group);

}  // namespace tessera::optim
