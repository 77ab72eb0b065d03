// The type in which norms, softmaxes, rotations and sums over many elements are
// taken: fp64 for fp64, else fp32.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

inline at::ScalarType wide_type(const at::Tensor& like) {
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace tessera::nn
