// How often the host reads what a device computed, on this thread: what it asks
// for by read_on_host(), and what LibTorch's operators hand to the host (item()
// and its like), whatever device their tensors are on.
#pragma once

#include <cstdint>

namespace tessera::verify::detail {

// Of its life. One at a time on a thread; at::DisableRecordFunctionGuard hides
// operators from it.
class HostReads {
 public:
  HostReads();
  ~HostReads();
  HostReads(const HostReads&) = delete;
  HostReads& operator=(const HostReads&) = delete;

  int64_t count() const;

 private:
  const int64_t before_;  // of read_on_host()
  uint64_t callback_;
};

}  // namespace tessera::verify::detail
