// The mesh of ranks: degrees along named axes, and who is where.
//
// A value type: mixed-radix arithmetic on an ordered list of (axis, degree).
// The product of the degrees is the world size; the first axis of the order is
// the outermost (slowest). Default order: that of kAxes, from pp to tp, so that
// rank = ((pp * dp_replicate + ...) * tp) + tp's coord.
//
// The expert view re-folds the axes of a stage (in the order of the mesh) into
// expert_replicate x expert_dp x ep x etp, etp innermost. With etp = 1 an
// expert is whole on its rank and ep takes the tp ranks first; with etp = tp
// every expert is split as the other layers are. With expert_replicate =
// dp_replicate it is that axis, and expert_dp and ep stay inside a replica;
// with 1 they go on over replicas.
//
// Errors: a world that is not the product, or an expert view that does not
//         fold, is TS_CHECK_CONFIG with all factors named.
// No communication, no process, no global.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/axis.h"

namespace tessera::mesh {

// A rank's place in both views.
struct Coord {
  std::array<int64_t, kNumAxes> at{};  // by Axis
  int64_t operator[](Axis axis) const { return at[static_cast<size_t>(axis)]; }
  int64_t& operator[](Axis axis) { return at[static_cast<size_t>(axis)]; }
  bool operator==(const Coord&) const = default;
};

class DeviceMesh {
 public:
  // A mesh of one rank.
  DeviceMesh();
  // REQUIRES: `order` names every axis once; empty means the default order.
  DeviceMesh(const Degrees& degrees, int64_t world_size,
             std::vector<Axis> order = {});

  int64_t world_size() const { return world_size_; }
  int64_t degree(Axis axis) const;
  const std::vector<Axis>& order() const { return order_; }

  Coord coord_of(int64_t rank) const;
  // By the coords along the factors of the world.
  int64_t rank_at(const Coord& coord) const;

  // Coords along an axis.
  struct Along {
    Axis axis;
    std::vector<int64_t> coords;
  };
  // The ranks, ascending, whose coords along these axes are among those named,
  // and along all others those of `at`. REQUIRES: axes of one view, as peers().
  std::vector<int64_t> ranks_at(const Coord& at,
                                const std::vector<Along>& along) const;

  // The ranks that differ from `rank` only along `axes`, ascending, itself
  // included. REQUIRES: axes of one view; pp is in both.
  std::vector<int64_t> peers(int64_t rank, const std::vector<Axis>& axes) const;

  // Where `coord` is among the ranks that differ from it along the axes of
  // data alone, from 0: those that see other samples.
  int64_t data_rank_of(const Coord& coord) const;

  // The groups along an axis: "{0,1} {2,3}"; of many the first, and how many.
  std::string describe_groups(Axis axis) const;

  // The axes along which these ranks differ: "dp_replicate+tp"; "" for one.
  std::string axes_of(const std::vector<int64_t>& ranks) const;

  // Axes of degree > 1: "dp_shard=1 tp=0"; "" where there is none.
  std::string describe(int64_t rank) const;
  // "pp 1 x dp_replicate 2 x ... x tp 1 = 2", and where they are folded
  // ", experts expert_dp 1 x ep 2 x etp 1", of which expert_replicate is the
  // first where it is above 1.
  std::string describe() const;

 private:
  void check_world() const;
  void check_experts() const;
  void check_replicas() const;
  bool is_folded(Axis axis) const;
  void fold(Coord& coord) const;
  void unfold(Coord& coord) const;

  Degrees degrees_;
  int64_t world_size_ = 1;
  std::vector<Axis> order_;
};

}  // namespace tessera::mesh
