// A step of one size against the gradient's sign, whatever the learning rate
// and however the gradient is scaled: p <- p - rate sign(g). Of biases that
// balance experts (nn/moe.h), whose gradient is how much too often one was
// chosen; beside every optimizer, and no choice of optimizer.type.
// Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

const UpdateRule& sign_step();

}  // namespace tessera::optim
