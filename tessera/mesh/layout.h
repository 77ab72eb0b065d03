// The layout of a parameter: the one fact from which all else follows.
//
// A Layout says, for a tensor of global shape S and for each axis of the mesh,
// whether it is sharded on that axis (and on which dim), replicated, or a
// partial sum. From it follow initial values, the axes over which a gradient is
// summed, how it counts in the norm, its checkpoint slice and its memory.
//
// Every shard is a Box of the global tensor. Axes that shard the same dim do so
// one inside the other, in the order tp, cp, dp_shard, dp_replicate, pp, for
// any order of the mesh: tp cuts the tensor, and dp_shard cuts dim 0 inside the
// box that tp left, as FSDP2 does. A dim of n over d pieces goes in chunks of
// ceil(n/d): the last pieces may be shorter or empty.
//
// Shapes: elements, never bytes. No communication, no process, no global.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/axis.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::mesh {

// [offset, offset + size) in each dim of a global tensor.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> size;

  int64_t numel() const;
  bool empty() const { return numel() == 0; }
  bool operator==(const Box&) const = default;
};

// The common part of two boxes of one tensor; empty sizes where there is none.
Box intersect(const Box& a, const Box& b);

struct Placement {
  enum class Kind { kReplicate, kShard, kPartial };
  Kind kind = Kind::kReplicate;
  int64_t dim = -1;  // of kShard

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {Kind::kShard, dim}; }
  static Placement partial() { return {Kind::kPartial, -1}; }
  bool is_shard() const { return kind == Kind::kShard; }
  bool operator==(const Placement&) const = default;
};

class Layout {
 public:
  Layout() = default;
  // Replicated on every axis.
  explicit Layout(std::vector<int64_t> global_shape);

  const std::vector<int64_t>& global_shape() const { return global_shape_; }
  int64_t global_numel() const;
  Placement on(Axis axis) const;
  Layout with(Axis axis, Placement placement) const;

  // The part of the global tensor that the rank at `coord` holds.
  Box local_box(const DeviceMesh& mesh, const Coord& coord) const;
  std::vector<int64_t> local_shape(const DeviceMesh& mesh,
                                   const Coord& coord) const;

  // True on exactly one of the ranks that hold the same box: the rank whose
  // coord is 0 on every axis that does not shard. It counts in norms and
  // writes the checkpoint.
  bool owned_by(const Coord& coord) const;

  std::string describe() const;  // "[512, 64] tp: shard(0), dp_shard: shard(0)"
  bool operator==(const Layout&) const = default;

 private:
  std::vector<int64_t> global_shape_;
  std::array<Placement, kAxes.size()> placements_;
};

// Piece `index` of [0, n) cut into `pieces` chunks of ceil(n/pieces).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
Range chunk_of(int64_t n, int64_t pieces, int64_t index);

}  // namespace tessera::mesh
