// Calls of c10d that may never return, with a deadline and without its noise.
#pragma once

#include <c10/util/Logging.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::launch::detail {

// What a deadline of ours gives c10d's own time-out, to name the cause itself.
inline constexpr std::chrono::milliseconds kDeadlineSlack =
    std::chrono::seconds(1);

inline double in_seconds(std::chrono::milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

// While one lives, c10d keeps its own lines (with stack frames) to itself: the
// errors here say it in one. TORCH_CPP_LOG_LEVEL brings them back.
class QuietC10d {
 public:
  QuietC10d() {
    std::lock_guard lock(mutex());
    if (depth()++ > 0 || std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) return;
    level_before() = std::exchange(FLAGS_caffe2_log_level, c10::GLOG_FATAL);
  }
  ~QuietC10d() {
    std::lock_guard lock(mutex());
    if (--depth() > 0 || !level_before()) return;
    FLAGS_caffe2_log_level = *std::exchange(level_before(), std::nullopt);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static int& depth() {
    static int depth = 0;
    return depth;
  }
  static std::optional<int>& level_before() {
    static std::optional<int> level;
    return level;
  }
};

// The result of `body`, or TS_CHECK_REACH(complaint) when it takes longer. A
// TCPStore waits for ever for a listener that stays mute; its thread is left
// behind then, in a process that is about to end. `body` owns what it touches.
template <typename Body>
auto within(std::chrono::milliseconds limit, const std::string& complaint,
            Body body) {
  using Result = decltype(body());
  auto task = std::make_shared<std::packaged_task<Result()>>(
      [body = std::move(body), context = rank_context()]() mutable {
        const RankContextGuard guard(context);
        const QuietC10d quiet;
        return body();
      });
  std::future<Result> result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  TS_CHECK_REACH(result.wait_for(limit) == std::future_status::ready,
                 complaint);
  return result.get();
}

}  // namespace tessera::launch::detail
