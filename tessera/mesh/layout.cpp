#include "tessera/mesh/layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

// From the outermost cut to the innermost, in each view. A stage is no cut.
constexpr std::array kCutOrder = [] {
  std::array<Axis, kAxes.size() - 1> order{};
  std::reverse_copy(kAxes.begin() + 1, kAxes.end(), order.begin());
  return order;
}();
constexpr std::array kExpertCutOrder = {Axis::kEp, Axis::kEtp, Axis::kExpertDp,
                                        Axis::kExpertReplicate};

int64_t product_of(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) product *= size;
  return product;
}

std::string text_of(const Placement& placement) {
  std::string text = "replicate";
  if (placement.is_shard()) {
    text = "shard(" + std::to_string(placement.dim);
    if (placement.copies > 1) {
      text += ", " + std::to_string(placement.copies) + " copies";
    }
    text += ")";
  }
  return placement.summed ? text + " summed" : text;
}

}  // namespace

Box Box::whole(std::vector<int64_t> shape) {
  return {std::vector<int64_t>(shape.size(), 0), std::move(shape)};
}

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

Layout::Layout(std::vector<int64_t> global_shape, View view)
    : view_(view), global_shape_(std::move(global_shape)) {
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
  TORCH_INTERNAL_ASSERT(std::ranges::count(axes(), axis) == 1, name_of(axis),
                        " has no placement here");
  TORCH_INTERNAL_ASSERT(
      !placement.is_shard() || (placement.dim >= 0 && placement.dim < dims),
      name_of(axis), ": shard(", placement.dim, ") of a tensor of ", dims,
      " dims");
  Layout changed = *this;
  changed.placements_[static_cast<size_t>(axis)] = placement;
  return changed;
}

Layout Layout::on_stages(std::vector<int64_t> stages) const {
  TORCH_INTERNAL_ASSERT(!stages.empty() && std::ranges::is_sorted(stages));
  Layout changed = *this;
  changed.stages_ = std::move(stages);
  return changed;
}

std::span<const Axis> Layout::axes() const {
  if (is_of_expert()) return kExpertCutOrder;
  return kCutOrder;
}

bool Layout::held_by(const Coord& coord) const {
  return stages_.empty() ||
         std::ranges::binary_search(stages_, coord[Axis::kPp]);
}

Box Layout::local_box(const DeviceMesh& mesh, const Coord& coord) const {
  Box box = Box::whole(global_shape_);
  if (!held_by(coord)) {
    box.size.assign(box.size.size(), 0);
    return box;
  }
  for (Axis axis : axes()) {
    const Placement& placement = on(axis);
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.dim);
    const Range piece =
        chunk_of(box.size[dim], mesh.degree(axis) / placement.copies,
                 coord[axis] / placement.copies);
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
  if (!held_by(coord)) return false;
  if (coord[Axis::kPp] != (stages_.empty() ? 0 : stages_.front())) return false;
  return std::ranges::all_of(axes(), [&](Axis axis) {
    return on(axis).is_shard() ? coord[axis] % on(axis).copies == 0
                               : coord[axis] == 0;
  });
}

int64_t Layout::num_holders(const DeviceMesh& mesh) const {
  int64_t holders =
      stages_.empty() ? mesh.degree(Axis::kPp) : std::ssize(stages_);
  for (Axis axis : axes()) {
    holders *= on(axis).is_shard() ? on(axis).copies : mesh.degree(axis);
  }
  return holders;
}

std::vector<int64_t> Layout::gradient_peers(const DeviceMesh& mesh,
                                            int64_t rank) const {
  const Coord mine = mesh.coord_of(rank);
  const auto coords = [](int64_t begin, int64_t end) {
    std::vector<int64_t> all(end - begin);
    std::iota(all.begin(), all.end(), begin);
    return all;
  };
  std::vector<DeviceMesh::Along> along = {
      {Axis::kPp,
       stages_.empty() ? coords(0, mesh.degree(Axis::kPp)) : stages_}};
  for (Axis axis : axes()) {
    const Placement& placement = on(axis);
    if (!placement.summed) continue;
    // Of those that hold different pieces the neighbours that hold the same.
    const int64_t same =
        placement.is_shard() ? placement.copies : mesh.degree(axis);
    const int64_t begin = mine[axis] / same * same;
    along.push_back(
        {axis, coords(begin, std::min(begin + same, mesh.degree(axis)))});
  }
  return mesh.ranks_at(mine, along);
}

std::string Layout::describe() const {
  std::string text = "[";
  for (size_t dim = 0; dim < global_shape_.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(global_shape_[dim]);
  }
  text += "]";
  const char* separator = " ";
  for (Axis axis : axes()) {
    if (on(axis) == Placement::replicate()) continue;
    text += separator + std::string(name_of(axis)) + ": " + text_of(on(axis));
    separator = ", ";
  }
  if (!stages_.empty()) {
    text += std::string(separator) + "stages";
    for (int64_t stage : stages_) text += " " + std::to_string(stage);
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
