#include "tessera/comm/shm/channel.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::shm {

int64_t Channel::room() const {
  return kChannelBytes -
         static_cast<int64_t>(written.load(std::memory_order_relaxed) -
                              taken.load());
}

int64_t Channel::available() const {
  return static_cast<int64_t>(written.load(std::memory_order_acquire) -
                              taken.load(std::memory_order_relaxed));
}

void Channel::write(const void* from, int64_t count) {
  const uint64_t before = written.load(std::memory_order_relaxed);
  const auto at = static_cast<int64_t>(before % kChannelBytes);
  const int64_t first = std::min(count, kChannelBytes - at);
  std::memcpy(bytes.data() + at, from, first);
  std::memcpy(bytes.data(), static_cast<const char*>(from) + first,
              count - first);
  written.store(before + count, std::memory_order_release);
}

void Channel::read(void* to, int64_t count) {
  const uint64_t before = taken.load(std::memory_order_relaxed);
  const auto at = static_cast<int64_t>(before % kChannelBytes);
  const int64_t first = std::min(count, kChannelBytes - at);
  std::memcpy(to, bytes.data() + at, first);
  std::memcpy(static_cast<char*>(to) + first, bytes.data(), count - first);
  taken.store(before + count);  // before wants_room is looked at
}

}  // namespace tessera::comm::shm
