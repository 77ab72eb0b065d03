#include "tessera/comm/gloo/message_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace tessera::comm::gloo {
namespace {

// Who is about to wait needs no other thread.
constexpr auto kPatience = std::chrono::milliseconds(1);

}  // namespace

void MessageQueue::submit(c10::intrusive_ptr<c10d::Work> message,
                          c10::intrusive_ptr<PendingWork> work) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({std::move(message), std::move(work), Clock::now()});
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  // One that is up comes back to the queue by itself.
  if (asleep_) called_.notify_one();
}

void MessageQueue::run_until_done(PendingWork& work) {
  std::unique_lock lock(mutex_);
  while (!work.isCompleted()) {
    const auto own =
        std::find_if(waiting_.begin(), waiting_.end(),
                     [&](const Message& m) { return m.work.get() == &work; });
    if (own == waiting_.end()) {
      ended_.wait(lock);
    } else {
      await(lock, own);
    }
  }
}

void MessageQueue::close() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    called_.notify_one();
    ended_.wait(lock, [&] {
      return waiting_.empty() && awaited_.empty() && num_told_ == 0;
    });
  }
  if (thread_.joinable()) thread_.join();
}

void MessageQueue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    asleep_ = true;
    called_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
    asleep_ = false;
    if (waiting_.empty()) return;
    const auto early = waiting_.front().since + kPatience - Clock::now();
    if (closing_ || early <= Clock::duration::zero()) {
      await(lock, waiting_.begin());
    } else {
      called_.wait_for(lock, early, [&] { return closing_; });
    }
  }
}

void MessageQueue::await(std::unique_lock<std::mutex>& lock,
                         const std::deque<Message>::iterator& waiting) {
  Message taken = std::move(*waiting);
  waiting_.erase(waiting);
  awaited_.push_back(taken.message);
  std::exception_ptr error = failure_;
  lock.unlock();
  bool is_aborted = error != nullptr;
  try {
    is_aborted = is_aborted || !taken.message->wait();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  lock.lock();
  std::erase(awaited_, taken.message);
  if (is_aborted) error = failure_;
  if (error && !failure_) {
    failure_ = error;
    for (const auto& other : awaited_) other->abort();
  }
  ++num_told_;
  lock.unlock();
  taken.work->complete(error);
  taken = {};  // not under the lock: what it held may call back
  lock.lock();
  --num_told_;
  ended_.notify_all();
}

}  // namespace tessera::comm::gloo
