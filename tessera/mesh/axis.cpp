#include "tessera/mesh/axis.h"

#include "tessera/core/error.h"

namespace tessera::mesh {

const char* name_of(Axis axis) {
  switch (axis) {
    case Axis::kPp:
      return "pp";
    case Axis::kDpReplicate:
      return "dp_replicate";
    case Axis::kDpShard:
      return "dp_shard";
    case Axis::kCp:
      return "cp";
    case Axis::kTp:
      return "tp";
    case Axis::kExpertDp:
      return "expert_dp";
    case Axis::kEp:
      return "ep";
    case Axis::kEtp:
      return "etp";
  }
  TORCH_INTERNAL_ASSERT(false, "no axis ", static_cast<int>(axis));
}

Axis axis_named(const std::string& name) {
  for (Axis axis : kAxes) {
    if (name == name_of(axis)) return axis;
  }
  TS_CHECK_CONFIG(false, "mesh: \"", name,
                  "\" is no axis of the mesh. The "
                  "axes are pp, dp_replicate, dp_shard, cp, tp.");
}

}  // namespace tessera::mesh
