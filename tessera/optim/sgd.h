// Stochastic gradient descent with momentum, as PyTorch computes it:
//
//   g <- g + weight_decay p                           where the segment decays
//   b <- momentum b + g (b starts at 0)         p <- p - lr b
//
// State:   "momentum.<parameter>" (b), where momentum is not 0; "step".
// Kernel:  ATen's fused one: one pass over memory.
// Source:  Sutskever et al. 2013, ICML, with lr outside of b.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

void sgd(const OptimizerConfig& config, const UpdateGroup& group);

}  // namespace tessera::optim
