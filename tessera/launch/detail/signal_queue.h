// The signals that stop a launcher, as a pipe to be polled.
//
// SIGTERM, SIGINT, SIGHUP and SIGUSR1, less those that were ignored (nohup), go
// into the queue while it lives. Handlers, not a mask: a thread of a library
// that does not block a signal would take it, and the process would end.
// SIGPIPE is ignored meanwhile, for a reader of stderr may go. SIGCHLD has its
// default, also where it was ignored: the kernel would keep no end of a child.
// Threads: one queue a process.
#pragma once

#include <csignal>
#include <map>

#include "tessera/core/fd.h"

namespace tessera::launch::detail {

class SignalQueue {
 public:
  SignalQueue();
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int fd() const { return read_end_.get(); }
  int next() const;  // the next signal that came in, 0 when there is none
  // Gives the signals back: from then on none comes in.
  void close();

 private:
  void take(int signal, void (*handler)(int));

  std::map<int, struct sigaction> before_;
  Fd read_end_;
  Fd write_end_;
};

}  // namespace tessera::launch::detail
