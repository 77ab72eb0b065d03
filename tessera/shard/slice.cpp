#include "tessera/shard/slice.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"

namespace tessera::shard {
namespace {

// `box`, seen from the corner of `within`.
mesh::Box relative(mesh::Box box, const mesh::Box& within) {
  for (size_t dim = 0; dim < box.offset.size(); ++dim) {
    box.offset[dim] -= within.offset[dim];
  }
  return box;
}

}  // namespace

at::Tensor slice(const at::Tensor& global, const mesh::Box& box) {
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

int64_t copy_overlap(const at::Tensor& source, const mesh::Box& source_box,
                     at::Tensor target, const mesh::Box& target_box) {
  const mesh::Box common = mesh::intersect(source_box, target_box);
  if (common.empty()) return 0;
  at::NoGradGuard no_grad;
  slice(target, relative(common, target_box))
      .copy_(slice(source, relative(common, source_box)));
  return common.numel();
}

}  // namespace tessera::shard
