#include "tessera/comm/gloo/message_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace tessera::comm::gloo {
namespace {

// Who is about to wait needs no other thread.
constexpr auto kPatience = std::chrono::milliseconds(1);
constexpr auto kLook = std::chrono::seconds(1);

// A wait that is aborted before it begins does not wait.
std::exception_ptr why_closed(c10d::Work& line) {
  try {
    line.abort();
    line.wait();
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

// Of a message whose wait was aborted: it may have ended before its line did,
// for a peer that is done closes its lines.
std::exception_ptr unless_done(c10d::Work& message,
                               const std::exception_ptr& closed) {
  try {
    message.wait(std::chrono::milliseconds(1));
    return nullptr;
  } catch (const std::exception&) {
    return closed;
  }
}

}  // namespace

void MessageQueue::submit(c10::intrusive_ptr<c10d::Work> message,
                          c10::intrusive_ptr<PendingWork> work,
                          c10::intrusive_ptr<c10d::Work> line) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(
      {std::move(message), std::move(line), std::move(work), Clock::now()});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { loop(); });
    watches_ = std::thread([this] { watch_lines(); });
  }
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
    is_closed_ = true;
    closed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  if (watches_.joinable()) watches_.join();
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

void MessageQueue::watch_lines() {
  std::unique_lock lock(mutex_);
  while (!closed_.wait_for(lock, kLook, [&] { return is_closed_; })) {
    for (Awaited& awaited : awaited_) {
      if (awaited.closed) continue;
      awaited.closed = why_closed(*awaited.line);
      if (awaited.closed) awaited.message->abort();
    }
  }
}

void MessageQueue::await(std::unique_lock<std::mutex>& lock,
                         const std::deque<Message>::iterator& waiting) {
  Message taken = std::move(*waiting);
  waiting_.erase(waiting);
  awaited_.push_back({taken.message, taken.line});
  std::exception_ptr error = failure_;
  lock.unlock();
  bool is_done = false;
  try {
    is_done = !error && taken.message->wait();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  lock.lock();
  const auto own = std::find_if(
      awaited_.begin(), awaited_.end(),
      [&](const Awaited& other) { return other.message == taken.message; });
  if (!error && !is_done) {
    error = failure_ ? failure_ : unless_done(*taken.message, own->closed);
  }
  awaited_.erase(own);
  if (error && !failure_) {
    failure_ = error;
    for (const Awaited& other : awaited_) other.message->abort();
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
