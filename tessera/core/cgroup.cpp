#include "tessera/core/cgroup.h"

#include <fstream>
#include <sstream>

namespace tessera {
namespace {

bool is_among(const std::string& name, const std::string& list) {
  std::istringstream names(list);
  for (std::string each; std::getline(names, each, ',');) {
    if (each == name) return true;
  }
  return false;
}

void add_upwards(const std::string& mount, std::string group,
                 const std::string& file, std::vector<std::string>& files) {
  for (;;) {
    if (group == "/") group.clear();
    files.push_back(mount + group + "/" + file);
    if (group.empty()) return;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

// A line is "NUMBER:CONTROLLERS:GROUP", of version 2 without controllers.
std::vector<std::string> cgroup_files(const std::string& controller,
                                      const std::string& of_version_2,
                                      const std::string& of_version_1) {
  std::vector<std::string> files;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t kinds = line.find(':') + 1, group = line.find(':', kinds) + 1;
    if (kinds == 0 || group == 0 || line[group] != '/') continue;
    const std::string kind = line.substr(kinds, group - kinds - 1);
    if (kind.empty()) {
      add_upwards("/sys/fs/cgroup", line.substr(group), of_version_2, files);
    } else if (is_among(controller, kind)) {
      add_upwards("/sys/fs/cgroup/" + kind, line.substr(group), of_version_1,
                  files);
    }
  }
  return files;
}

}  // namespace tessera
