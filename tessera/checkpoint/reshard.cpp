#include "tessera/checkpoint/reshard.h"

#include <ATen/Functions.h>

#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kTrainedOn = "rewritten; trained on ";

// Of a tensor of that shape, on one of so many ranks.
mesh::Box part_of(const std::vector<int64_t>& shape, int64_t ranks,
                  int64_t rank) {
  mesh::Box box = mesh::Box::whole(shape);
  if (shape.empty()) return box;  // a scalar is whole
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
    if (tensor.shape.empty() && world.rank() > 0) continue;  // the first's
    const mesh::Box box = part_of(tensor.shape, world.size(), world.rank());
    state.tensors.push_back({.name = tensor.name,
                             .global_shape = tensor.shape,
                             .box = box,
                             .local = at::empty(box.size, tensor.dtype)});
  }
  const int64_t step = load(step_folder, state, world);
  std::string mesh = manifest.mesh;
  if (!mesh.starts_with(kTrainedOn)) mesh = kTrainedOn + mesh;
  save(folder, step, state, world, {.keep = 0, .mesh = mesh});
  return step;
}

}  // namespace tessera::checkpoint
