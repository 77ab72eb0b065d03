// The loops of kernels/ for the vectors of this processor, and their types.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/core/vectors.h"
#include "tessera/optim/kernels/kernels.h"

namespace tessera::optim::detail {

inline const kernels::Kernels& table() {
  static const auto& chosen = *that_run_here(kernels::kByVectors).back();
  return chosen;
}

// REQUIRES: a tensor of fp64, fp32, bf16 or fp16.
inline kernels::Gradient type_of(const at::Tensor& gradient) {
  switch (gradient.scalar_type()) {
    case at::kDouble:
      return kernels::Gradient::kF64;
    case at::kFloat:
      return kernels::Gradient::kF32;
    case at::kHalf:
      return kernels::Gradient::kF16;
    default:
      return kernels::Gradient::kBF16;
  }
}

// What one thread takes at least.
inline constexpr int64_t kElementsPerPart = int64_t{1} << 14;

}  // namespace tessera::optim::detail
