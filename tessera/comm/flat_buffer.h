// Many tensors in one contiguous buffer, so that one collective moves them all.
//
// Shapes: item i has its own shape; the buffer is one-dimensional. Every item
//         starts at a multiple of kAlignment elements; the gaps hold zeros.
// Views:  view(i) shares the buffer's memory and has no autograd history: it
//         can serve as a parameter's .grad or .data.
// Threads: none of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/alignment.h"

namespace tessera::comm {

class FlatBuffer {
 public:
  static constexpr int64_t kAlignment = kFlatAlignment;  // elements

  FlatBuffer() = default;
  // `extra` further elements follow the last item, for a caller's own use.
  // `group`: that moves it, and has memory from which it need not be copied;
  // then it cannot be resized.
  FlatBuffer(std::vector<std::vector<int64_t>> shapes,
             const at::TensorOptions& options, int64_t extra = 0,
             Group* group = nullptr);

  const at::Tensor& flat() const { return flat_; }  // items, gaps, extra
  at::Tensor view(size_t item) const;
  at::Tensor extra() const;  // the `extra` last elements

 private:
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<int64_t> offsets_;
  int64_t extra_ = 0;
  at::Tensor flat_;
};

}  // namespace tessera::comm
