// A Work that a backend completes, and the thread that runs the collectives of
// a group: shared by the backends that are written here.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::comm {

class PendingWork : public c10d::Work {
 public:
  PendingWork(int rank, c10d::OpType type, std::vector<at::Tensor> tensors);
  // REQUIRES: called once. Completes the future first, then wakes wait().
  void complete(const std::exception_ptr& error);
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Runs bodies in the order in which they were submitted. After one has thrown,
// `on_failure` is told and all later ones fail with the same error.
class Worker {
 public:
  explicit Worker(std::function<void(const std::string& why)> on_failure);
  // Runs what was submitted, then ends.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void submit(c10::intrusive_ptr<PendingWork> work, std::function<void()> body);

 private:
  struct Task {
    c10::intrusive_ptr<PendingWork> work;
    std::function<void()> body;
  };
  void loop();
  void execute(Task& task);

  std::function<void(const std::string&)> on_failure_;
  std::exception_ptr failure_;  // of the worker's thread alone
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
