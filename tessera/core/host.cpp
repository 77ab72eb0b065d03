#include "tessera/core/host.h"

#include <unistd.h>

#include <array>
#include <fstream>

namespace tessera {
namespace {

// "/net:[4026531840]"; a kernel without namespaces has one of each: "".
std::string space_of(const char* name) {
  std::array<char, 64> link{};
  const bool is_known = readlink(name, link.data(), link.size() - 1) > 0;
  return is_known ? std::string("/") + link.data() : "";
}

}  // namespace

std::string host_name() {
  char name[256] = {};  // one more than Linux allows, for the closing zero
  const bool known = gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

std::string host_identity() {
  return host_name() + "/" + process_space() + space_of("/proc/self/ns/net");
}

std::string host_name_in(const std::string& identity) {
  return identity.substr(0, identity.find('/'));
}

std::string process_space() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + space_of("/proc/self/ns/pid");
}

}  // namespace tessera
