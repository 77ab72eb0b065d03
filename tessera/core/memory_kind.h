// What the tensors that a thread allocates are for. A counting allocator
// (monitor/memory.h) books them by it.
//
//   const MemoryScope scope(MemoryKind::kOptimizer);
//   state = at::zeros_like(parameter);
//
// Memory that does not come from LibTorch's allocator is booked by a receipt.
// Threads: each has its own kind; kWork at first. Receipts: any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tessera {

// kWork: activations, and all that nobody said otherwise of. kMapped: states
// that lie in files (file_memory.h), while they are fetched.
enum class MemoryKind { kWork, kParameters, kGradients, kOptimizer, kMapped };
inline constexpr size_t kNumMemoryKinds = 5;

namespace detail {
inline thread_local MemoryKind memory_kind = MemoryKind::kWork;
}  // namespace detail

inline MemoryKind memory_kind() { return detail::memory_kind; }

class MemoryScope {
 public:
  explicit MemoryScope(MemoryKind kind) : before_(detail::memory_kind) {
    detail::memory_kind = kind;
  }
  ~MemoryScope() { detail::memory_kind = before_; }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  MemoryKind before_;
};

// What counts such memory; monitor/memory.h sets one.
struct MemoryCounter {
  void* (*take)(int64_t bytes, MemoryKind kind);
  void (*give_back)(void* receipt);
};
inline std::atomic<const MemoryCounter*> memory_counter = nullptr;

// nullptr where nobody counts.
inline void* take_memory_receipt(int64_t bytes) {
  const MemoryCounter* counter = memory_counter;
  return counter == nullptr ? nullptr : counter->take(bytes, memory_kind());
}
inline void give_back_memory_receipt(void* receipt) {
  if (receipt != nullptr) memory_counter.load()->give_back(receipt);
}

}  // namespace tessera
