#include "tessera/mesh/layout.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

// From the outermost cut to the innermost.
constexpr std::array kCutOrder = {Axis::kTp, Axis::kCp, Axis::kDpShard,
                                  Axis::kDpReplicate, Axis::kPp};

int64_t product_of(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) product *= size;
  return product;
}

std::string text_of(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kReplicate:
      return "replicate";
    case Placement::Kind::kShard:
      return "shard(" + std::to_string(placement.dim) + ")";
    case Placement::Kind::kPartial:
      return "partial";
  }
  TORCH_INTERNAL_ASSERT(false, "no placement");
}

}  // namespace

int64_t Box::numel() const { return product_of(size); }

Box intersect(const Box& a, const Box& b) {
  TORCH_INTERNAL_ASSERT(a.size.size() == b.size.size(), "boxes of ",
                        a.size.size(), " and of ", b.size.size(), " dims");
  Box common = a;
  for (size_t dim = 0; dim < a.size.size(); ++dim) {
    const int64_t begin = std::max(a.offset[dim], b.offset[dim]);
    const int64_t end =
        std::min(a.offset[dim] + a.size[dim], b.offset[dim] + b.size[dim]);
    common.offset[dim] = begin;
    common.size[dim] = std::max<int64_t>(end - begin, 0);
  }
  return common;
}

Layout::Layout(std::vector<int64_t> global_shape)
    : global_shape_(std::move(global_shape)) {
  for (int64_t size : global_shape_) {
    TORCH_INTERNAL_ASSERT(size >= 0, "a dim of size ", size);
  }
}

int64_t Layout::global_numel() const { return product_of(global_shape_); }

Placement Layout::on(Axis axis) const {
  return placements_[static_cast<size_t>(axis)];
}

Layout Layout::with(Axis axis, Placement placement) const {
  const auto dims = static_cast<int64_t>(global_shape_.size());
  TORCH_INTERNAL_ASSERT(
      !placement.is_shard() || (placement.dim >= 0 && placement.dim < dims),
      name_of(axis), ": shard(", placement.dim, ") of a tensor of ", dims,
      " dims");
  Layout changed = *this;
  changed.placements_[static_cast<size_t>(axis)] = placement;
  return changed;
}

Box Layout::local_box(const DeviceMesh& mesh, const Coord& coord) const {
  Box box{std::vector<int64_t>(global_shape_.size(), 0), global_shape_};
  for (Axis axis : kCutOrder) {
    if (!on(axis).is_shard()) continue;
    const auto dim = static_cast<size_t>(on(axis).dim);
    const Range piece = chunk_of(box.size[dim], mesh.degree(axis), coord[axis]);
    box.offset[dim] += piece.begin;
    box.size[dim] = piece.size();
  }
  return box;
}

std::vector<int64_t> Layout::local_shape(const DeviceMesh& mesh,
                                         const Coord& coord) const {
  return local_box(mesh, coord).size;
}

bool Layout::owned_by(const Coord& coord) const {
  return std::all_of(kAxes.begin(), kAxes.end(), [&](Axis axis) {
    return on(axis).is_shard() || coord[axis] == 0;
  });
}

std::string Layout::describe() const {
  std::string text = "[";
  for (size_t dim = 0; dim < global_shape_.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(global_shape_[dim]);
  }
  text += "]";
  const char* separator = " ";
  for (Axis axis : kCutOrder) {
    if (on(axis).kind == Placement::Kind::kReplicate) continue;
    text += separator + std::string(name_of(axis)) + ": " + text_of(on(axis));
    separator = ", ";
  }
  return text;
}

Range chunk_of(int64_t n, int64_t pieces, int64_t index) {
  TORCH_INTERNAL_ASSERT(n >= 0 && pieces > 0 && index >= 0 && index < pieces,
                        "piece ", index, " of ", pieces, " of ", n);
  const int64_t chunk = n / pieces + (n % pieces != 0 ? 1 : 0);
  return {std::min(n, index * chunk), std::min(n, (index + 1) * chunk)};
}

}  // namespace tessera::mesh
