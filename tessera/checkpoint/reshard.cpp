#include "tessera/checkpoint/reshard.h"

#include <ATen/Functions.h>

#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

// Of a tensor of that shape, on one of so many ranks. A scalar is the first's.
mesh::Box part_of(const std::vector<int64_t>& shape, int64_t ranks,
                  int64_t rank) {
  mesh::Box box{std::vector<int64_t>(shape.size(), 0), shape};
  if (shape.empty()) return box;
  const mesh::Range rows = mesh::chunk_of(shape[0], ranks, rank);
  box.offset[0] = rows.begin;
  box.size[0] = rows.size();
  return box;
}

}  // namespace

int64_t reshard(const std::string& step_folder, const std::string& folder,
                comm::Group& world) {
  const Manifest manifest = read_manifest(step_folder);
  State state;
  for (const TensorSpec& tensor : manifest.tensors) {
    const mesh::Box box = part_of(tensor.shape, world.size(), world.rank());
    if (tensor.shape.empty() && world.rank() > 0) continue;
    state.tensors.push_back({.name = tensor.name,
                             .global_shape = tensor.shape,
                             .box = box,
                             .local = at::empty(box.size, tensor.dtype)});
  }
  const int64_t step = load(step_folder, state, world);
  save(folder, step, state, world,
       {.keep = 0,
        .mesh = c10::str(world.size(), world.size() == 1 ? " rank" : " ranks",
                         ", rewritten; trained on ", manifest.mesh)});
  return step;
}

}  // namespace tessera::checkpoint
