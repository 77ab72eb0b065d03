#include "tessera/comm/shm/peer_memory.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "tessera/comm/base/reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {

Share PeerMemory::share_of(const void* data) const {
  using Kind = Share::Kind;
  // An input is read by peers alone; what all_reduce writes was given as such.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  char* address = static_cast<char*>(const_cast<void*>(data));
  if (segment_.is_one_process()) {
    return {.kind = Kind::kAddress, .address = address};
  }
  if (const auto location = locate(data)) {
    return {.kind = Kind::kRegion, .location = *location};
  }
  if (segment_.can_read_peers()) {
    return {.kind = Kind::kForeign, .address = address};
  }
  return {};
}

char* PeerMemory::address_of(int64_t rank, const Share& share) {
  if (share.kind == Share::Kind::kAddress) return share.address;
  try {
    return regions_.address_of(segment_.lane(rank).pid, share.location,
                               c10::str("rank ", segment_.place().ranks[rank]));
  } catch (const c10::Error&) {
    check_not_lost(rank);
    throw;
  }
}

void PeerMemory::copy_from(int64_t rank, const Share& share, void* to,
                           int64_t offset, int64_t bytes) {
  if (share.kind != Share::Kind::kForeign) {
    return copy_bytes(to, address_of(rank, share) + offset, bytes);
  }
  const pid_t pid = segment_.lane(rank).pid;
  if (copy_from_process(pid, to, share.address + offset, bytes)) return;
  const int error = errno;
  check_not_lost(rank);
  C10_THROW_ERROR(DistBackendError,
                  c10::str("cannot copy ", bytes, " bytes out of rank ",
                           segment_.place().ranks[rank], " (pid ", pid,
                           "): ", std::strerror(error)));
}

// The memory of a process goes before those who watch it hear of its end.
void PeerMemory::check_not_lost(int64_t rank) const {
  constexpr auto kHeardWithin = std::chrono::milliseconds(200);
  const auto end = std::chrono::steady_clock::now() + kHeardWithin;
  do {
    if (const auto loss = segment_.loss_of(rank)) {
      C10_THROW_ERROR(DistBackendError, *loss);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (std::chrono::steady_clock::now() < end);
}

}  // namespace tessera::comm::shm
