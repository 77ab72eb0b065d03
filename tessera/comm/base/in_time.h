// Questions to a store that may never answer: its host may be cut off.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace tessera::comm {

// Runs `question` on a thread of its own. False when it has not come back in
// `time`: then the thread is left behind, with all that the question holds; the
// rank that asked is about to end. Throws what the question throws. Counted in
// slices: a process that was stopped and goes on does not take that for
// silence.
inline bool ask_in_time(std::function<void()> question,
                        std::chrono::milliseconds time) {
  std::packaged_task<void()> task(std::move(question));
  std::future<void> done = task.get_future();
  std::thread thread(std::move(task));
  constexpr std::chrono::milliseconds kSlice{200};
  bool answered = false;
  for (auto left = time; !answered; left -= kSlice) {
    answered =
        done.wait_for(std::min(left, kSlice)) == std::future_status::ready;
    if (left <= kSlice) break;
  }
  answered ? thread.join() : thread.detach();
  if (answered) done.get();
  return answered;
}

}  // namespace tessera::comm
