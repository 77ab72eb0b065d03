#include "bindings/python/callback_threads.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

namespace tessera::python {
namespace {

// Of the threads here: one more than their own level.
thread_local size_t next_level = 0;

}  // namespace

class CallbackThreads::Level {
 public:
  void push(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  void close() {
    {
      std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_one();
  }

  void loop(size_t level) {
    next_level = level + 1;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return is_closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds is not dropped under the lock
      lock.lock();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_closing_ = false;
};

// A callback may be what drops the group: its thread cannot be joined here.
CallbackThreads::~CallbackThreads() {
  for (const auto& level : levels_) level->close();
}

size_t CallbackThreads::level_here() { return next_level; }

void CallbackThreads::run(size_t level, std::function<void()> task) {
  std::lock_guard lock(mutex_);
  while (levels_.size() <= level) {
    auto fresh = std::make_shared<Level>();
    std::thread([fresh, at = levels_.size()] { fresh->loop(at); }).detach();
    levels_.push_back(std::move(fresh));
  }
  levels_[level]->push(std::move(task));
}

}  // namespace tessera::python
