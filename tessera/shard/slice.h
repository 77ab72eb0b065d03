// Between a global tensor and the boxes of it that ranks hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/mesh/layout.h"

namespace tessera::shard {

// The part of `global` that `box` names, as a view.
// REQUIRES: the box lies inside the tensor.
at::Tensor slice(const at::Tensor& global, const mesh::Box& box);

// Copies the common part of two boxes of one global tensor from `source` (which
// holds `source_box`) into `target` (which holds `target_box`). Returns the
// number of elements copied; dtypes are converted.
int64_t copy_overlap(const at::Tensor& source, const mesh::Box& source_box,
                     at::Tensor target, const mesh::Box& target_box);

}  // namespace tessera::shard
