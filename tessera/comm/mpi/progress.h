// The one thread of a process that makes calls of MPI, and what groups give it.
//
// A Channel is the queue of one group: its collectives run one after the other,
// in the order of the calls; its messages all at once, beside them. The thread
// posts what was submitted, tests what is under way, completes what is done,
// and sleeps when there is nothing. While it waits it yields for as long as the
// bytes may take, and then naps, so that more ranks than cores go on.
// Errors:  an operation that fails or is not done within the time-out fails all
//          that its channel has and will have (c10::DistBackendError). What MPI
//          may still write to stays alive until the process ends.
// End:     MPI that was started here is ended with the process, when its last
//          channel is closed and none failed. Else the process leaves without a
//          word to MPI, and mpirun ends the others; its exit code is this
//          process's own. A program that started MPI has it for itself once its
//          channels are closed.
// Threads: submit(), fail(), wait() and close() from any; the rest on its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/base/worker.h"
#include "tessera/comm/mpi/calls.h"
#include "tessera/comm/mpi/life.h"

namespace tessera::comm::mpi {

// One call of a group.
struct Job {
  c10::intrusive_ptr<PendingWork> work;
  bool is_message = false;
  int64_t bytes = 0;  // that it moves, roughly
  std::function<void(Comm&, Requests&)> post;
  std::function<void(const Requests&)> finish;  // when all is done; or none
};

class Progress;

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // Blocks until all `ranks` open the group of this name.
  static std::shared_ptr<Channel> open(const std::vector<int64_t>& ranks,
                                       uint64_t name,
                                       std::chrono::milliseconds timeout,
                                       int64_t largest_count);

  void submit(Job job);
  // Makes what is pending, and all that comes, fail for this reason.
  void fail(const std::string& why);
  // For what is pending.
  void wait();
  // Waits, then frees the communicators.
  void close();

 private:
  friend class Progress;
  using Clock = std::chrono::steady_clock;
  struct Running {
    Job job;
    Requests requests{};
    Clock::time_point begun{};
  };

  Channel(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  void add(Job job);
  // Whether anything ended.
  bool advance();
  bool advance(Running& running);
  void begin(Running& running);
  void begin_next();
  void abandon(const std::exception_ptr& error);
  bool is_idle() const { return !collective_ && messages_.empty(); }
  int64_t bytes_under_way() const;

  const std::chrono::milliseconds timeout_;
  // Of the thread alone.
  std::unique_ptr<Comm> comm_;
  std::deque<Job> waiting_;  // collectives
  std::optional<Running> collective_;
  std::list<Running> messages_;
  std::exception_ptr failure_;
};

class Progress {
 public:
  // Started with the first call.
  static Progress& of_process();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // This process in MPI_COMM_WORLD; starts MPI.
  World world();

 private:
  friend class Channel;
  Progress();
  // Runs `task` on the thread; all tasks run in the order given. False, and it
  // is dropped, when the process ends.
  bool post(std::function<void()> task);
  // The same, and waits; throws what it throws.
  void call(std::function<void()> task);
  // The process ends, or one more channel is closed meanwhile.
  void end_if_idle(bool process_ends);
  void loop();
  bool take_tasks(std::vector<std::function<void()>>& tasks,
                  std::chrono::milliseconds sleep);
  bool advance_channels();
  bool may_nudge() const;
  void pause(std::chrono::steady_clock::time_point moved) const;
  std::chrono::milliseconds sleep_after(
      std::chrono::steady_clock::time_point moved) const;

  // Of the thread alone.
  std::optional<World> world_;
  std::vector<std::shared_ptr<Channel>> busy_;
  int64_t open_channels_ = 0;
  bool failed_ = false;
  bool process_ends_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> tasks_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::mpi
