// The bytes in flight from one rank to another: a ring in shared memory.
//
// Each side counts what it moved; the counts only grow, and their difference is
// in flight. A writer that found no room says so, and is rung when there is
// some.
// Threads: one writer, one reader.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace tessera::comm::shm {

inline constexpr int64_t kChannelBytes = 128 << 10;

struct Channel {
  int64_t room() const;
  int64_t available() const;
  // REQUIRES: count <= room().
  void write(const void* from, int64_t count);
  // REQUIRES: count <= available().
  void read(void* to, int64_t count);

  alignas(64) std::atomic<uint64_t> written;
  std::atomic<bool> wants_room;
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) std::array<char, kChannelBytes> bytes;
};

}  // namespace tessera::comm::shm
