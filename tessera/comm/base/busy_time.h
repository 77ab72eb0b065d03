// In which a rank has some operation under way, on any of its groups: however
// many there are at once, a second counts once.
// Threads: any.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace tessera::comm {

class BusyTime {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    if (under_way_++ == 0) since_ = Clock::now();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    if (--under_way_ == 0) seconds_ += since_begin();
  }
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return under_way_ > 0 ? seconds_ + since_begin() : seconds_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double since_begin() const {
    return std::chrono::duration<double>(Clock::now() - since_).count();
  }

  mutable std::mutex mutex_;
  int64_t under_way_ = 0;
  Clock::time_point since_ = {};
  double seconds_ = 0;
};

}  // namespace tessera::comm
