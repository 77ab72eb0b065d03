// The control groups that this process is in: containers and job schedulers
// limit some of them.
#pragma once

#include <string>
#include <vector>

namespace tessera {

// A file of its group and of each above it, upwards: of version 2 by that name,
// of a controller of version 1 ("memory") by the other. They need not be there.
std::vector<std::string> cgroup_files(const std::string& controller,
                                      const std::string& of_version_2,
                                      const std::string& of_version_1);

}  // namespace tessera
