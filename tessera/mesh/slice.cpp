#include "tessera/mesh/slice.h"

#include <ATen/ATen.h>

#include "tessera/core/error.h"

namespace tessera::mesh {

at::Tensor slice(const at::Tensor& global, const Box& box) {
  TORCH_INTERNAL_ASSERT(box.size.size() == static_cast<size_t>(global.dim()),
                        "slice: a box of ", box.size.size(),
                        " dims of a tensor of ", global.dim());
  at::Tensor part = global;
  for (size_t dim = 0; dim < box.size.size(); ++dim) {
    part =
        part.narrow(static_cast<int64_t>(dim), box.offset[dim], box.size[dim]);
  }
  return part;
}

Box relative(Box box, const Box& within) {
  for (size_t dim = 0; dim < box.offset.size(); ++dim) {
    box.offset[dim] -= within.offset[dim];
  }
  return box;
}

}  // namespace tessera::mesh
