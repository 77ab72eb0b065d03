// Adds the time of its life to seconds_blocked() of its thread.
#pragma once

#include <chrono>

namespace tessera::comm {

class BlockedTime {
 public:
  explicit BlockedTime(bool counts = true) : counts_(counts) {}
  ~BlockedTime();
  BlockedTime(const BlockedTime&) = delete;
  BlockedTime& operator=(const BlockedTime&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  bool counts_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace tessera::comm
