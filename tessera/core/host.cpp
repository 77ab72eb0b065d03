#include "tessera/core/host.h"

#include <unistd.h>

#include <array>
#include <fstream>

namespace tessera {

std::string host_name() {
  char name[256] = {};  // one more than Linux allows, for the closing zero
  const bool known = gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

std::string host_identity() {
  std::string identity = host_name();
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  identity += "/" + boot;
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    // "net:[4026531840]"; a kernel without namespaces has one of each.
    std::array<char, 64> link{};
    if (readlink(name, link.data(), link.size() - 1) > 0) {
      identity += std::string("/") + link.data();
    }
  }
  return identity;
}

}  // namespace tessera
