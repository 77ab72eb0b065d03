// The threads on which the futures of a group complete, and with them run the
// callbacks that Python hung on them.
//
// Order:  callbacks run one after the other, in the order of completion: so the
//         operations that they start have the same order on all ranks.
// Levels: what a callback starts completes on the next level's thread, so that
//         the callback may wait for it.
// A thread starts when its level is first used, and ends once the group is gone
// and its tasks have run.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::python {

class CallbackThreads {
 public:
  ~CallbackThreads();

  // On which level an operation completes that this thread starts now.
  static size_t level_here();
  void run(size_t level, std::function<void()> task);

 private:
  class Level;

  std::mutex mutex_;
  std::vector<std::shared_ptr<Level>> levels_;
};

}  // namespace tessera::python
