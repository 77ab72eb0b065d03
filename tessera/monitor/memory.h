// Memory of a rank: bytes in tensors, now and at most, and what the system
// says of the process and the host.
//
// count_tensor_bytes() puts a counting allocator in front of LibTorch's own for
// CPU tensors (storages, autograd's buffers, oneDNN's scratch; not MKL's
// internal buffers, not from_blob). Bytes are booked to the process and, where
// ranks are threads, to the rank whose RankMemory was alive on the thread that
// allocated, by what they are for (core/memory_kind.h); a free goes to the same
// account from any thread.
// Tensors of a device are booked the same way on a thread where a DeviceMemory
// is alive, from what LibTorch's allocator says of it.
// Units:  bytes.
// Threads: all functions from any thread.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>

#include "tessera/core/memory_kind.h"

namespace tessera::monitor {

// Idempotent. Tensors that exist already keep their allocator, uncounted.
void count_tensor_bytes();

struct Account;

struct TensorBytes {
  int64_t now = 0;
  int64_t peak = 0;
};

// Of this thread's rank where a RankMemory is alive on it, else the process.
TensorBytes tensor_bytes();
// In tensors of one kind, whose peak need not be when that of all is; of the
// same account.
TensorBytes tensor_bytes(MemoryKind kind);
// Peaks start again from now; the same account as tensor_bytes().
void reset_tensor_peak();

// Books this thread's tensors to an account of its own while it lives.
class RankMemory {
 public:
  RankMemory();
  ~RankMemory();
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

 private:
  Account* before_;
};

// Books what this thread allocates on devices, and threads that go on with its
// state, while it lives. Beside it LibTorch's profiler of memory hears nothing.
class DeviceMemory {
 public:
  DeviceMemory();

 private:
  c10::DebugInfoGuard listens_;
};

// What the host has, or what the cgroup allows of it. 0: unknown.
int64_t host_memory_bytes();

}  // namespace tessera::monitor
