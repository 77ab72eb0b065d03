// Tensors, and rows of an all_to_all, as bytes: for what only moves them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

// The memory of a contiguous tensor.
inline at::Tensor bytes_of(const at::Tensor& tensor) {
  at::AutoDispatchBelowAutograd guard;
  return tensor.view(-1).view(at::kByte);
}

// Bytes of the rows of dim 0 that go to, or come from, each rank.
inline std::vector<int64_t> split_bytes(const at::Tensor& tensor,
                                        std::vector<int64_t> splits) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t& split : splits) split *= rows > 0 ? bytes / rows : 0;
  return splits;
}

}  // namespace tessera::comm
