#include "tessera/comm/base/worker.h"

#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm {

PendingWork::PendingWork(int rank, c10d::OpType type,
                         std::vector<at::Tensor> tensors,
                         std::shared_ptr<Driver> driver)
    : c10d::Work(rank, type),
      tensors_(std::move(tensors)),
      driver_(std::move(driver)) {}

void PendingWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> asked;
  {
    std::lock_guard lock(future_mutex_);
    settled_ = true;
    error_ = error;
    asked = future_;
  }
  try {
    if (asked) settle(*asked);
  } catch (const std::exception& thrown) {
    log::error("a callback of a collective's future threw: ",
               message_of(thrown));
  }
  finish(error);
}

bool PendingWork::wait(std::chrono::milliseconds timeout) {
  if (driver_ != nullptr && timeout == kNoTimeout && !isCompleted()) {
    driver_->run_until_done(*this);
  }
  return Work::wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (!future_) {
    static const c10::TypePtr kTensors =
        c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(kTensors);
    if (settled_) settle(*future_);
  }
  return future_;
}

void PendingWork::settle(c10::ivalue::Future& future) const {
  if (error_) {
    future.setError(error_);
  } else {
    future.markCompleted(c10::IValue(tensors_));
  }
}

Worker::Worker(std::function<void(const std::string&)> on_failure)
    : on_failure_(std::move(on_failure)) {}

void Worker::close() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    changed_.wait(lock, [&] { return !running_; });
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::submit(c10::intrusive_ptr<PendingWork> work,
                    std::function<void()> body) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(work), std::move(body)});
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
}

void Worker::run_here(const c10::intrusive_ptr<PendingWork>& work,
                      c10::function_ref<void()> body) {
  std::unique_lock lock(mutex_);
  if (running_ || !tasks_.empty()) {
    tasks_.push_back({work, body});
    lock.unlock();
    return run_until_done(*work);
  }
  running_ = true;
  lock.unlock();
  execute(*work, body);
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

void Worker::run_until_done(PendingWork& work) {
  std::unique_lock lock(mutex_);
  while (!work.isCompleted()) {
    if (running_ || tasks_.empty()) {
      changed_.wait(lock);
    } else {
      run_next(lock);
    }
  }
}

void Worker::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [&] { return !running_ && (closing_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    run_next(lock);
  }
}

void Worker::run_next(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  lock.unlock();
  const bool failed_before = failure_ != nullptr;
  execute(*task.work, task.body);
  if (failure_ && !failed_before) {
    keep_for_ever(new std::function<void()>(std::move(task.body)));
  }
  task = {};  // not under the lock: what it held may call back
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

void Worker::execute(PendingWork& work, c10::function_ref<void()> body) {
  if (!failure_) {
    try {
      body();
    } catch (const std::exception&) {
      failure_ = std::current_exception();
      on_failure_(message_of(failure_));
    }
  }
  work.complete(failure_);
}

}  // namespace tessera::comm
