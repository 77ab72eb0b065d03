// The layout of a parameter: the one fact from which all else follows.
//
// A Layout says, for a tensor of global shape S and for each axis of the mesh,
// whether it is sharded on that axis (and on which dim) or replicated, and
// whether the ranks along the axis compute the same gradient or each a part of
// it; and which pipeline stages hold it.
// From it follow initial values, the ranks over which a gradient is summed, how
// it counts in the norm, its checkpoint slice and its memory.
//
// Every shard is a Box of the global tensor. Axes that shard the same dim do so
// one inside the other, tp outermost and on through kAxes backwards, for any
// order of the mesh: tp cuts the tensor, and dp_shard cuts dim 0 inside the box
// that tp left, as FSDP2 does. A dim of n over d pieces goes in chunks of
// ceil(n/d): the last pieces may be shorter or empty. Stacked experts, counted
// by dim 0, are placed on the axes of the experts' view: ep, etp, expert_dp,
// expert_replicate.
//
// Shapes: elements, never bytes. No communication, no process, no global.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/mesh/axis.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::mesh {

// [offset, offset + size) in each dim of a global tensor.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> size;

  // All of a tensor of that shape.
  static Box whole(std::vector<int64_t> shape);
  int64_t numel() const;
  bool empty() const { return numel() == 0; }
  bool operator==(const Box&) const = default;
};

// The common part of two boxes of one tensor; empty sizes where there is none.
Box intersect(const Box& a, const Box& b);

struct Placement {
  enum class Kind { kReplicate, kShard };
  Kind kind = Kind::kReplicate;
  int64_t dim = -1;  // of kShard
  // Of kShard: so many neighbours along the axis hold the same piece (key/value
  // heads that are fewer than the tensor-parallel ranks).
  int64_t copies = 1;
  // Ranks along the axis that hold the same elements compute a part of their
  // gradient each (they see other tokens, or use the parameter otherwise): it
  // is summed over them. Else each computes the whole.
  bool summed = false;

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim, int64_t copies = 1) {
    return {Kind::kShard, dim, copies, /*summed=*/copies > 1};
  }
  // Replicated, and the gradient is a sum over the axis.
  static Placement replicate_summed() {
    return {Kind::kReplicate, -1, 1, /*summed=*/true};
  }
  bool is_shard() const { return kind == Kind::kShard; }
  bool operator==(const Placement&) const = default;
};

// The axes on which a parameter is placed: the factors of the world, or those
// that experts fold them into.
enum class View { kDense, kExperts };

class Layout {
 public:
  Layout() = default;
  // Replicated on every axis.
  explicit Layout(std::vector<int64_t> global_shape, View view = View::kDense);

  const std::vector<int64_t>& global_shape() const { return global_shape_; }
  int64_t global_numel() const;
  Placement on(Axis axis) const;
  // REQUIRES: an axis of this layout's view; not pp: on_stages().
  Layout with(Axis axis, Placement placement) const;
  bool is_of_expert() const { return view_ == View::kExperts; }
  // The axis over which ZeRO cuts it, and the dim: dp_shard and dim 0; of
  // experts expert_dp and dim 1, so that each is cut as it would be alone.
  Axis data_axis() const {
    return is_of_expert() ? Axis::kExpertDp : Axis::kDpShard;
  }
  int64_t data_dim() const { return is_of_expert() ? 1 : 0; }
  // The axis over which there are copies of what ZeRO cuts.
  Axis replica_axis() const {
    return is_of_expert() ? Axis::kExpertReplicate : Axis::kDpReplicate;
  }
  // Held by these pipeline stages (coords of pp, ascending) alone; one that
  // several hold is used by each in its own way: its gradient is their sum.
  Layout on_stages(std::vector<int64_t> stages) const;
  bool held_by(const Coord& coord) const;

  // The part of the global tensor that the rank at `coord` holds: an empty box
  // where its stage does not hold the parameter.
  Box local_box(const DeviceMesh& mesh, const Coord& coord) const;
  std::vector<int64_t> local_shape(const DeviceMesh& mesh,
                                   const Coord& coord) const;

  // True on exactly one of the ranks that hold the same box, the first of them
  // along every axis. It counts in norms and writes the checkpoint.
  bool owned_by(const Coord& coord) const;
  // How many ranks hold the same box, of any that is not empty.
  int64_t num_holders(const DeviceMesh& mesh) const;

  // The ranks, ascending, over which the gradient of `rank`'s elements is
  // summed, itself included; data_axis() is left to a reduce_scatter where it
  // shards. Ranks whose parts come by way of another axis are not among them.
  std::vector<int64_t> gradient_peers(const DeviceMesh& mesh,
                                      int64_t rank) const;

  std::string describe() const;  // "[512, 64] tp: shard(0), dp_shard: shard(0)"
  bool operator==(const Layout&) const = default;

 private:
  std::span<const Axis> axes() const;

  View view_ = View::kDense;
  std::vector<int64_t> global_shape_;
  std::array<Placement, kNumAxes> placements_;
  std::vector<int64_t> stages_;  // empty: all of them
};

// Piece `index` of [0, n) cut into `pieces` chunks of ceil(n/pieces).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
Range chunk_of(int64_t n, int64_t pieces, int64_t index);

}  // namespace tessera::mesh
