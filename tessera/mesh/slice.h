// Between a global tensor and the boxes of it that ranks hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/mesh/layout.h"

namespace tessera::mesh {

// The part of `global` that `box` names, as a view.
// REQUIRES: the box lies inside the tensor.
at::Tensor slice(const at::Tensor& global, const Box& box);

// `box`, seen from the corner of `within`, which holds it: where it lies in a
// tensor that holds `within` alone.
Box relative(Box box, const Box& within);

}  // namespace tessera::mesh
