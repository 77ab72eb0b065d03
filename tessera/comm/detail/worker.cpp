#include "tessera/comm/detail/worker.h"

#include "tessera/core/error.h"

namespace tessera::comm {

PendingWork::PendingWork(int rank, c10d::OpType type,
                         std::vector<at::Tensor> tensors)
    : c10d::Work(rank, type),
      tensors_(std::move(tensors)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

void PendingWork::complete(const std::exception_ptr& error) {
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(tensors_));
  }
  finish(error);
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  return future_;
}

Worker::Worker(std::function<void(const std::string&)> on_failure)
    : on_failure_(std::move(on_failure)) {}

Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
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
  changed_.notify_one();
}

void Worker::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    execute(task);
    lock.lock();
  }
}

void Worker::execute(Task& task) {
  if (!failure_) {
    try {
      task.body();
    } catch (const std::exception&) {
      failure_ = std::current_exception();
      on_failure_(message_of(failure_));
    }
  }
  task.work->complete(failure_);
}

}  // namespace tessera::comm
