#include "tessera/comm/shm/memory_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::comm::shm {
namespace {

constexpr const char* kOneHost =
    "The ranks of one host share the user and the PID namespace; otherwise use "
    "comm.backend=gloo.";

// What the host could still give, in bytes; nullopt where it does not say.
std::optional<size_t> memory_available() {
  std::ifstream info("/proc/meminfo");
  std::string name, unit;
  size_t kib = 0;
  while (info >> name >> kib) {
    std::getline(info, unit);
    if (name == "MemAvailable:") return kib << 10;
  }
  return std::nullopt;
}

}  // namespace

Fd make_memory_file(const std::string& name, size_t bytes,
                    const std::string& use) {
  const auto available = memory_available();
  TS_CHECK(!available || bytes <= *available, "cannot ", use, ": it takes ",
           bytes_text(bytes), " of shared memory, and this host has ",
           bytes_text(available.value_or(0)),
           " to give. Use fewer ranks on this host, or comm.backend=gloo.");
  Fd file(memfd_create(("tessera-" + name).substr(0, 200).c_str(),
                       MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool shaped = file.get() >= 0 && fchmod(file.get(), 0600) == 0 &&
                      ftruncate(file.get(), static_cast<off_t>(bytes)) == 0 &&
                      fcntl(file.get(), F_ADD_SEALS,
                            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  TS_CHECK(shaped, "cannot ", use, ": no ", bytes,
           " bytes of shared memory: ", std::strerror(errno));
  return file;
}

void map_file_of(pid_t pid, int fd, size_t bytes, const std::string& owner,
                 Mapping& mapping) {
  const std::string path = c10::str("/proc/", pid, "/fd/", fd);
  const Fd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  TS_CHECK_REACH(file.get() >= 0, "cannot open the shared memory of ", owner,
                 " (", path, "): ", std::strerror(errno), ". ", kOneHost);
  struct stat info{};
  TS_CHECK_REACH(fstat(file.get(), &info) == 0 &&
                     static_cast<size_t>(info.st_size) == bytes,
                 path, " holds ", info.st_size, " bytes, not the ", bytes,
                 " that ", owner, " shares. ", kOneHost);
  TS_CHECK(mapping.map(file.get(), bytes), "cannot map ", bytes,
           " bytes of shared memory: ", std::strerror(errno));
}

uint64_t random_nonce() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace tessera::comm::shm
