// The loops of kernels/ for the vectors of this processor, and their types.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/vectors.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/kernels/kernels.h"

namespace tessera::nn::detail {

// Those that run here, the fastest last.
inline std::vector<const kernels::Kernels*> tables_that_run_here() {
  const auto by_vectors = that_run_here(kernels::kByVectors);
  std::vector<const kernels::Kernels*> all(by_vectors.begin(),
                                           by_vectors.end());
  if (multiplies_bf16()) all.push_back(&kernels::kAvx512Bf16);
  return all;
}

inline const kernels::Kernels& table() {
  static const auto& chosen = uses(Kernel::kBf16Attention)
                                  ? *tables_that_run_here().back()
                                  : *that_run_here(kernels::kByVectors).back();
  return chosen;
}

inline kernels::Element element_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kernels::Element::kF64;
    case at::kFloat:
      return kernels::Element::kF32;
    case at::kBFloat16:
      return kernels::Element::kBF16;
    case at::kHalf:
      return kernels::Element::kF16;
    default:
      TS_CHECK(false, "there is no CPU kernel for ", x.scalar_type(),
               "; there are some for fp64, fp32, bf16 and fp16.");
  }
}

inline void* elements_from(const at::Tensor& x, int64_t first) {
  return static_cast<char*>(x.data_ptr()) +
         first * static_cast<int64_t>(x.itemsize());
}

}  // namespace tessera::nn::detail
