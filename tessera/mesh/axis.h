// The axes of the mesh, named once.
//
// An axis is a factor of the world; its degree is its size; a coord is a
// position along it. (A tensor has dims, never axes.) Sequence parallelism has
// no axis: it lives on tp. Experts see the ranks of dp_replicate x dp_shard x
// cp x tp re-folded into expert_dp x ep x etp: a second view of the same ranks,
// never further factors of the world.
#pragma once

#include <array>
#include <string>

namespace tessera::mesh {

enum class Axis { kPp, kDpReplicate, kDpShard, kCp, kTp, kExpertDp, kEp, kEtp };
inline constexpr size_t kNumAxes = 8;

// The factors of the world, and the view that experts have of it.
inline constexpr std::array kAxes = {Axis::kPp, Axis::kDpReplicate,
                                     Axis::kDpShard, Axis::kCp, Axis::kTp};
inline constexpr std::array kExpertAxes = {Axis::kPp, Axis::kExpertDp,
                                           Axis::kEp, Axis::kEtp};

// "pp", "dp_replicate", "dp_shard", "cp", "tp"; "expert_dp", "ep", "etp".
const char* name_of(Axis axis);
// Of kAxes. Throws TS_CHECK_CONFIG on another name.
Axis axis_named(const std::string& name);

}  // namespace tessera::mesh
