#include "tessera/mesh/device_mesh.h"

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

// The factors and their product, as "pp 2 x tp 4 = 8".
std::string equation(
    const std::vector<std::pair<std::string, int64_t>>& factors,
    const std::string& product) {
  std::string text;
  for (const auto& [name, degree] : factors) {
    text += (text.empty() ? "" : " x ") + name + " " + std::to_string(degree);
  }
  return text + " = " + product;
}

std::vector<int64_t> all_coords(int64_t degree) {
  std::vector<int64_t> coords(degree);
  std::iota(coords.begin(), coords.end(), int64_t{0});
  return coords;
}

// Those above 1, as a configuration has them.
std::string keys_of_factors(const DeviceMesh& mesh) {
  std::vector<std::string> keys;
  for (Axis axis : mesh.order()) {
    if (mesh.degree(axis) == 1) continue;
    const bool is_first_of_data =
        is_of_data(axis) && std::ranges::count(keys, "mesh.dp") == 0;
    if (is_first_of_data) keys.emplace_back("mesh.dp");
    keys.push_back(std::string("mesh.") + name_of(axis));
  }
  return keys.empty() ? "a factor" : c10::Join(" or ", keys);
}

}  // namespace

DeviceMesh::DeviceMesh() : DeviceMesh(Degrees{}, 1) {}

DeviceMesh::DeviceMesh(const Degrees& degrees, int64_t world_size,
                       std::vector<Axis> order)
    : degrees_(degrees), world_size_(world_size), order_(std::move(order)) {
  if (order_.empty()) order_.assign(kAxes.begin(), kAxes.end());
  TORCH_INTERNAL_ASSERT(order_.size() == kAxes.size() &&
                            std::all_of(kAxes.begin(), kAxes.end(),
                                        [&](Axis axis) {
                                          return std::count(order_.begin(),
                                                            order_.end(),
                                                            axis) == 1;
                                        }),
                        "a mesh's order names every axis once");
  check_world();
  check_experts();
}

void DeviceMesh::check_world() const {
  int64_t product = 1;
  bool fits = true;
  for (Axis axis : order_) {
    TS_CHECK_CONFIG(degree(axis) > 0, "mesh.", name_of(axis), " is ",
                    degree(axis), ". A degree is at least 1.");
    fits = fits && !__builtin_mul_overflow(product, degree(axis), &product);
  }
  TS_CHECK_CONFIG(fits && product == world_size_, "mesh: ", describe(),
                  ", but the world has ", world_size_, " ranks. Start ",
                  fits ? std::to_string(product) : "fewer",
                  " ranks, or change ", keys_of_factors(*this), ".",
                  fits && product < world_size_ && world_size_ % degrees_.pp > 0
                      ? c10::str(" ", kStagesAreAlike, ".")
                      : "");
}

void DeviceMesh::check_experts() const {
  const int64_t ep = degrees_.ep, etp = degrees_.etp;
  TS_CHECK_CONFIG(etp == 1 || etp == degrees_.tp, "mesh.etp is ", etp,
                  ". It is 1 (an expert is whole on its rank) or mesh.tp, ",
                  degrees_.tp, ".");
  const int64_t foldable = world_size_ / degrees_.pp / etp;
  std::vector<std::pair<std::string, int64_t>> factors;
  for (Axis axis : kAxes) {
    if (axis != Axis::kPp) factors.emplace_back(name_of(axis), degree(axis));
  }
  TS_CHECK_CONFIG(ep > 0 && foldable % ep == 0, "mesh.ep is ", ep,
                  ", which does not divide the ",
                  equation(factors, std::to_string(world_size_ / degrees_.pp)),
                  " ranks of a stage over etp ", etp, ". Use a divisor of ",
                  foldable, ".");
  if (degrees_.expert_replicate != 1) check_replicas();
}

// Experts that stay inside a replica: its ranks are neighbours in their view.
void DeviceMesh::check_replicas() const {
  const int64_t replicas = degrees_.dp_replicate;
  TS_CHECK_CONFIG(degrees_.expert_replicate == replicas,
                  "mesh: expert_replicate is ", degrees_.expert_replicate,
                  ". It is 1 (experts are sharded over all replicas) or "
                  "mesh.dp_replicate, ",
                  replicas, ".");
  const int64_t ranks = world_size_ / degrees_.pp / replicas;
  const int64_t foldable = ranks / degrees_.etp;
  TS_CHECK_CONFIG(
      foldable % degrees_.ep == 0, "mesh.ep is ", degrees_.ep,
      ", but with expert_replicate ", replicas,
      " (zero.expert_shard dp_shard) experts stay inside one of the ", replicas,
      " replicas (mesh.dp_replicate), which has ", ranks,
      " ranks of a stage, over etp ", degrees_.etp, ". Use a divisor of ",
      foldable, ", or zero.expert_shard all.");
  for (Axis axis : order_) {
    if (axis == Axis::kDpReplicate) break;
    TS_CHECK_CONFIG(!is_folded(axis) || degree(axis) == 1, "mesh.order has ",
                    name_of(axis),
                    " before dp_replicate, but with zero.expert_shard dp_shard "
                    "experts stay inside a replica, whose ranks of a stage are "
                    "neighbours then. Put dp_replicate before ",
                    name_of(axis), ", or use zero.expert_shard all.");
  }
}

int64_t DeviceMesh::degree(Axis axis) const {
  if (axis == Axis::kExpertDp) {
    return world_size_ / (degrees_.pp * degrees_.expert_replicate *
                          degrees_.ep * degrees_.etp);
  }
  return degrees_.*entry_of(axis).degree;
}

Coord DeviceMesh::coord_of(int64_t rank) const {
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < world_size_, "rank ", rank,
                        " is not in a world of ", world_size_);
  Coord coord;
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    coord[*axis] = rank % degree(*axis);
    rank /= degree(*axis);
  }
  fold(coord);
  return coord;
}

// An expert that is split as the other layers are (etp = tp) stays on its tp
// ranks.
bool DeviceMesh::is_folded(Axis axis) const {
  return axis != Axis::kPp && (axis != Axis::kTp || degrees_.etp == 1);
}

// ep takes the innermost axes first, and expert_replicate has the outermost.
void DeviceMesh::fold(Coord& coord) const {
  int64_t folded = 0;
  for (Axis axis : order_) {
    if (is_folded(axis)) folded = folded * degree(axis) + coord[axis];
  }
  const int64_t same_experts = folded / degrees_.ep;
  coord[Axis::kExpertReplicate] = same_experts / degree(Axis::kExpertDp);
  coord[Axis::kExpertDp] = same_experts % degree(Axis::kExpertDp);
  coord[Axis::kEp] = folded % degrees_.ep;
  coord[Axis::kEtp] = is_folded(Axis::kTp) ? 0 : coord[Axis::kTp];
}

int64_t DeviceMesh::rank_at(const Coord& coord) const {
  int64_t rank = 0;
  for (Axis axis : order_) {
    TORCH_INTERNAL_ASSERT(coord[axis] >= 0 && coord[axis] < degree(axis),
                          name_of(axis), "=", coord[axis], " is not on ",
                          describe());
    rank = rank * degree(axis) + coord[axis];
  }
  return rank;
}

// The way back from the experts' view.
void DeviceMesh::unfold(Coord& coord) const {
  const int64_t same_experts =
      coord[Axis::kExpertReplicate] * degree(Axis::kExpertDp) +
      coord[Axis::kExpertDp];
  int64_t folded = same_experts * degrees_.ep + coord[Axis::kEp];
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    if (!is_folded(*axis)) continue;
    coord[*axis] = folded % degree(*axis);
    folded /= degree(*axis);
  }
  if (!is_folded(Axis::kTp)) coord[Axis::kTp] = coord[Axis::kEtp];
}

std::vector<int64_t> DeviceMesh::ranks_at(
    const Coord& at, const std::vector<Along>& along) const {
  const auto is_of = [](const auto& view) {
    return [&view](const Along& each) {
      return std::ranges::count(view, each.axis) > 0;
    };
  };
  const bool dense = std::ranges::all_of(along, is_of(kAxes));
  TORCH_INTERNAL_ASSERT(dense || std::ranges::all_of(along, is_of(kExpertAxes)),
                        "axes of two views");
  std::vector<Coord> places = {at};
  for (const Along& each : along) {
    std::vector<Coord> wider;
    for (const Coord& place : places) {
      for (int64_t coord : each.coords) {
        wider.push_back(place);
        wider.back()[each.axis] = coord;
      }
    }
    places = std::move(wider);
  }
  std::vector<int64_t> ranks;
  for (Coord& place : places) {
    if (!dense) unfold(place);
    ranks.push_back(rank_at(place));
  }
  std::ranges::sort(ranks);
  const auto repeated = std::ranges::unique(ranks);
  ranks.erase(repeated.begin(), repeated.end());
  return ranks;
}

std::vector<int64_t> DeviceMesh::peers(int64_t rank,
                                       const std::vector<Axis>& axes) const {
  std::vector<Along> along;
  for (Axis axis : axes) along.push_back({axis, all_coords(degree(axis))});
  return ranks_at(coord_of(rank), along);
}

int64_t DeviceMesh::data_rank_of(const Coord& coord) const {
  int64_t place = 0;
  for (Axis axis : order_) {
    if (is_of_data(axis)) place = place * degree(axis) + coord[axis];
  }
  return place;
}

std::string DeviceMesh::describe_groups(Axis axis) const {
  constexpr size_t kMost = 16;  // ranks that are named
  std::string text;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    const auto group = peers(rank, {axis});
    if (group.front() != rank) continue;
    std::string members;
    for (size_t i = 0; i < std::min(group.size(), kMost); ++i) {
      members += (members.empty() ? "" : ",") + std::to_string(group[i]);
    }
    if (group.size() > kMost) members += ",...";
    text += (text.empty() ? "{" : " {") + members + "}";
    if (world_size_ > static_cast<int64_t>(kMost)) {
      return std::to_string(world_size_ / degree(axis)) + " of " +
             std::to_string(degree(axis)) + ", the first " + text;
    }
  }
  return text;
}

std::string DeviceMesh::axes_of(const std::vector<int64_t>& ranks) const {
  const Coord first = coord_of(ranks.front());
  std::vector<bool> differ(order_.size());
  for (const int64_t rank : ranks) {
    const Coord coord = coord_of(rank);
    for (size_t i = 0; i < order_.size(); ++i) {
      if (coord[order_[i]] != first[order_[i]]) differ[i] = true;
    }
  }
  std::vector<Axis> along;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (differ[i]) along.push_back(order_[i]);
  }
  return group_name_of(along);
}

std::string DeviceMesh::describe(int64_t rank) const {
  const Coord coord = coord_of(rank);
  std::string text;
  for (Axis axis : order_) {
    if (degree(axis) == 1) continue;
    text += (text.empty() ? "" : " ") + std::string(name_of(axis)) + "=" +
            std::to_string(coord[axis]);
  }
  return text;
}

std::string DeviceMesh::describe() const {
  std::vector<std::pair<std::string, int64_t>> factors;
  int64_t product = 1;
  bool fits = true;
  for (Axis axis : order_) {
    factors.emplace_back(name_of(axis), degree(axis));
    fits = fits && !__builtin_mul_overflow(product, degree(axis), &product);
  }
  std::string text =
      equation(factors, fits ? std::to_string(product) : "over 2^63");
  const bool is_folded =
      product == world_size_ &&
      degrees_.expert_replicate * degrees_.ep * degrees_.etp > 1;
  if (!is_folded) return text;
  std::string separator = ", experts ";
  for (Axis axis : kExpertAxes) {
    const bool is_told = axis != Axis::kPp &&
                         (axis != Axis::kExpertReplicate || degree(axis) > 1);
    if (!is_told) continue;
    text += separator + name_of(axis) + " " + std::to_string(degree(axis));
    separator = " x ";
  }
  return text;
}

}  // namespace tessera::mesh
