// Rows of an all_to_all as bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

// Bytes of the rows of dim 0 that go to, or come from, each rank.
inline std::vector<int64_t> split_bytes(const at::Tensor& tensor,
                                        std::vector<int64_t> splits) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t& split : splits) split *= rows > 0 ? bytes / rows : 0;
  return splits;
}

}  // namespace tessera::comm
