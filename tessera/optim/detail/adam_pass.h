// The update of Adam and AdamW, where it can be in one pass over memory: the
// gradient is scaled as it is read, and the copy in low precision is rounded as
// the master is written. Else by ATen's fused kernel, between passes for these.
//
// Types:   gradients of the parameters' type, or bf16 or fp16 beside fp32;
//          others are converted before. Copies in bf16 or fp16.
// Bits:    an element's depend on its own numbers alone, not on where it lies,
//          how many threads there are, or which vectors.
//          A GPU fuses products into sums: its own.
// Threads: work is shared out by core/parallel.h, all tensors as one range.
#pragma once

#include "tessera/optim/optim_config.h"
#include "tessera/optim/update_group.h"

namespace tessera::optim::detail {

enum class Decay { kInGradient, kDecoupled };

// Whether the update of such a parameter, or by such a gradient, heeds
// UpdateGroup::scale_there and pace_there; none of fp16 does.
bool reads_there(const at::Tensor& tensor);

// kept, step_size and root_scale of kernels::AdamNumbers.
Pace pace_of(const OptimizerConfig& config, const UpdateGroup& group,
             Decay decay);

void adam_update(const OptimizerConfig& config, const UpdateGroup& group,
                 Decay decay);

}  // namespace tessera::optim::detail
