#include "tessera/mesh/axis.h"

#include "tessera/core/error.h"

namespace tessera::mesh {

std::string names_of_axes() {
  std::string names;
  for (Axis axis : kAxes) {
    names += (names.empty() ? "" : ", ") + std::string(name_of(axis));
  }
  return names;
}

std::string group_name_of(const std::vector<Axis>& axes) {
  std::string name;
  for (Axis axis : axes) {
    name += (name.empty() ? "" : "+") + std::string(name_of(axis));
  }
  return name;
}

Axis axis_named(const std::string& name) {
  for (Axis axis : kAxes) {
    if (name == name_of(axis)) return axis;
  }
  TS_CHECK_CONFIG(false, "mesh: \"", name,
                  "\" is no axis of the mesh. The axes are ", names_of_axes(),
                  ".");
}

}  // namespace tessera::mesh
