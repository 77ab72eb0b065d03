// The axes of the mesh, named once: what is asked of each is asked of this
// table.
//
// An axis is a factor of the world; its degree is its size; a coord is a
// position along it. (A tensor has dims, never axes.) Sequence parallelism has
// no axis: it lives on tp. Experts see the ranks of a stage re-folded into
// expert_replicate x expert_dp x ep x etp: a second view of the same ranks,
// never further factors of the world.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::mesh {

enum class Axis {
  kPp,
  kDpReplicate,
  kDpShard,
  kCp,
  kTp,
  kExpertReplicate,
  kExpertDp,
  kEp,
  kEtp
};

struct Degrees {
  int64_t pp = 1;
  int64_t dp_replicate = 1;
  int64_t dp_shard = 1;
  int64_t cp = 1;
  int64_t tp = 1;
  int64_t ep = 1;   // expert view only
  int64_t etp = 1;  // expert view only: 1 or tp
  // Expert view only: 1, or dp_replicate, whose replicas are then apart there
  // too.
  int64_t expert_replicate = 1;
};

struct AxisEntry {
  const char* name;
  int64_t Degrees::* degree;  // null: what the others leave
};
// In the order of Axis.
inline constexpr std::array kAxisTable = {
    AxisEntry{"pp", &Degrees::pp},
    AxisEntry{"dp_replicate", &Degrees::dp_replicate},
    AxisEntry{"dp_shard", &Degrees::dp_shard},
    AxisEntry{"cp", &Degrees::cp},
    AxisEntry{"tp", &Degrees::tp},
    AxisEntry{"expert_replicate", &Degrees::expert_replicate},
    AxisEntry{"expert_dp", nullptr},
    AxisEntry{"ep", &Degrees::ep},
    AxisEntry{"etp", &Degrees::etp}};
inline constexpr size_t kNumAxes = kAxisTable.size();

// The factors of the world, and the view that experts have of it.
inline constexpr std::array kAxes = {Axis::kPp, Axis::kDpReplicate,
                                     Axis::kDpShard, Axis::kCp, Axis::kTp};
inline constexpr std::array kExpertAxes = {
    Axis::kPp, Axis::kExpertReplicate, Axis::kExpertDp, Axis::kEp, Axis::kEtp};

constexpr const AxisEntry& entry_of(Axis axis) {
  return kAxisTable.at(static_cast<size_t>(axis));
}
constexpr const char* name_of(Axis axis) { return entry_of(axis).name; }
// Along which ranks see other samples.
constexpr bool is_of_data(Axis axis) {
  return axis == Axis::kDpReplicate || axis == Axis::kDpShard;
}
// Why no stage has ranks that another has not, for messages.
inline constexpr const char* kStagesAreAlike =
    "Every stage has as many ranks as every other: mesh.tp and mesh.cp cut "
    "what each stage does, and mesh.dp replicates whole pipelines, no stage "
    "alone";
// "pp, dp_replicate, ...": of kAxes.
std::string names_of_axes();
// "dp_replicate+tp": of a group whose ranks differ along these.
std::string group_name_of(const std::vector<Axis>& axes);
// Of kAxes. Throws TS_CHECK_CONFIG on another name.
Axis axis_named(const std::string& name);

}  // namespace tessera::mesh
