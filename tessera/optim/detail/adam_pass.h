// The update of Adam and AdamW in one pass over memory: the gradient is scaled
// as it is read, and the copy in low precision is rounded as the master is
// written.
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

// On the CPU, or on a GPU that has its loop (of which there is none for fp16);
// and not left out by name.
bool runs_in_one_pass(const UpdateGroup& group);

// REQUIRES: runs_in_one_pass().
void adam_in_one_pass(const OptimizerConfig& config, const UpdateGroup& group,
                      Decay decay);

}  // namespace tessera::optim::detail
