// Lion, which steps by the sign of an interpolated momentum:
//
//   u <- sign(beta1 m + (1 - beta1) g)
//   p <- p - lr (u + weight_decay p)                  where the segment decays
//   m <- beta2 m + (1 - beta2) g
//
// Its betas are its authors' 0.9 and 0.99 where optimizer.betas is left open.
// An element moves by lr whatever its gradient: lr is 3 to 10 times smaller
// than AdamW's, weight_decay as many times larger.
// State:   "exp_avg.<parameter>" (m).
// Memory:  for each parameter in turn, one tensor as large as it.
// Source:  Chen et al. 2023, arXiv 2302.06675, algorithm 2.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

void lion(const OptimizerConfig& config, const UpdateGroup& group);

}  // namespace tessera::optim
