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

// REQUIRES: a tensor of fp64, fp32 or bf16.
inline kernels::Gradient type_of(const at::Tensor& gradient) {
  if (gradient.scalar_type() == at::kDouble) return kernels::Gradient::kF64;
  return gradient.scalar_type() == at::kFloat ? kernels::Gradient::kF32
                                              : kernels::Gradient::kBF16;
}

// What one thread takes at least.
inline constexpr int64_t kElementsPerPart = int64_t{1} << 14;

}  // namespace tessera::optim::detail
