#include "tessera/core/host.h"

#include <unistd.h>

#include <fstream>

namespace tessera {

std::string host_name() {
  char name[256] = {};  // one more than Linux allows, for the closing zero
  const bool known = gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) {
      return line.substr(colon + 2);
    }
  }
  return "an unknown processor";
}

}  // namespace tessera
