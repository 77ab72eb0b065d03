// What the tensors that a thread allocates are for. A counting allocator
// (monitor/memory.h) books them by it.
//
//   const MemoryScope scope(MemoryKind::kOptimizer);
//   state = at::zeros_like(parameter);
//
// Threads: each has its own; kWork at first.
#pragma once

#include <cstddef>

namespace tessera {

// kWork: activations, and all that nobody said otherwise of.
enum class MemoryKind { kWork, kParameters, kGradients, kOptimizer };
inline constexpr size_t kNumMemoryKinds = 4;

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

}  // namespace tessera
