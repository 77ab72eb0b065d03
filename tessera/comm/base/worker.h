// A Work that a backend completes, and the order in which a group's collectives
// run: shared by the backends that are written here.
//
// Bodies run one after the other, in the order of the calls, on whichever
// thread is free to: the worker's own, which starts with the first call that
// nobody awaits at once, or that of a caller who waits. So a caller that waits
// at once hands nothing over, which costs more than a small collective.
//
// Threads: any. Whoever waits for a work keeps its worker, also after close().
#pragma once

#include <c10/util/FunctionRef.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/base/keep_for_ever.h"

namespace tessera::comm {

class PendingWork;

// Completes works, with the help of those who wait for them.
class Driver {
 public:
  virtual ~Driver() = default;
  // Works on this thread, or waits for the one who does, until `work` is done.
  // REQUIRES: `work` was given to it. Once closed all are done.
  virtual void run_until_done(PendingWork& work) = 0;
};

class PendingWork : public c10d::Work {
 public:
  // `driver`: who completes it; wait() lends it its thread.
  PendingWork(int rank, c10d::OpType type, std::vector<at::Tensor> tensors,
              std::shared_ptr<Driver> driver = nullptr);
  // REQUIRES: called once. Completes the future first, then wakes wait(). What
  // a callback of the future throws is logged.
  void complete(const std::exception_ptr& error);
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return tensors_; }

  // Of a receive from any rank: whose message it was.
  int sourceRank() const override { return source_; }
  void set_source(int rank) { source_ = rank; }

 private:
  void settle(c10::ivalue::Future& future) const;

  std::vector<at::Tensor> tensors_;
  const std::shared_ptr<Driver> driver_;
  int source_ = -1;
  // The future is made for those who ask.
  std::mutex future_mutex_;
  bool settled_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// After a body has thrown, `on_failure` is told and all later ones fail with
// the same error. What it holds is kept for ever: a peer, or a message that it
// left behind, may still move it.
class Worker : public Driver {
 public:
  explicit Worker(std::function<void(const std::string& why)> on_failure);
  // REQUIRES: closed.
  ~Worker() override = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs what was submitted, then ends its thread.
  void close();
  void submit(c10::intrusive_ptr<PendingWork> work, std::function<void()> body);
  // The same, on this thread, after all that was submitted: done on return.
  // Allocates nothing where no other body runs. REQUIRES: `body` can be copied.
  template <typename Body>
  void run(const c10::intrusive_ptr<PendingWork>& work, const Body& body) {
    run_here(work, [&] {
      try {
        body();
      } catch (const std::exception&) {
        keep_for_ever(new Body(body));
        throw;
      }
    });
  }
  void run_until_done(PendingWork& work) override;

 private:
  struct Task {
    c10::intrusive_ptr<PendingWork> work;
    std::function<void()> body;
  };
  void loop();
  void run_here(const c10::intrusive_ptr<PendingWork>& work,
                c10::function_ref<void()> body);
  // REQUIRES: nobody runs a body, and there is one. Unlocks while it runs.
  void run_next(std::unique_lock<std::mutex>& lock);
  void execute(PendingWork& work, c10::function_ref<void()> body);

  std::function<void(const std::string&)> on_failure_;
  std::exception_ptr failure_;  // of whoever runs a body
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
