// One rank as a process: started, watched through a pidfd, ended with all that
// it started.
//
// A rank leads a process group of its own, so that a terminal's Ctrl-C reaches
// the launcher alone, and is killed when the launcher dies. Its stderr comes
// through a pipe; stdout is the launcher's, stdin is empty.
// Threads: the thread that starts a rank must outlive it (PR_SET_PDEATHSIG).
#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/fd.h"

namespace tessera::launch::detail {

// Becomes readable when the process ends; closed where there is none such.
Fd open_pidfd(pid_t pid);

struct RankProgram {
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  int inherited_fd = -1;                 // stays open in the rank
  // Else what a copy of this process does instead of argv, until its exit code.
  // It has what exec() would leave: these variables, no handlers, and of what
  // is open that without O_CLOEXEC. REQUIRES: this process has one thread.
  std::function<int()> as_copy = nullptr;
};

class RankProcess {
 public:
  // Throws TS_CHECK_USAGE when the program cannot be started.
  explicit RankProcess(const RankProgram& program);
  ~RankProcess();  // kills and reaps what still runs
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;

  bool running() const { return pid_ > 0; }
  int64_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable: it has ended
  Fd& stderr_pipe() { return stderr_; }       // not blocking

  void send(int signal) const;  // to the rank and all that it started
  // By which signal it was stopped since this was asked last, or 0: it goes on.
  // Nothing where it is as it was.
  std::optional<int> take_stop() const;
  // REQUIRES: pidfd() is readable. The status of waitpid(2). What the rank left
  // running is killed.
  int reap();
  // It goes on without this.
  void abandon() { pid_ = -1; }

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
  Fd stderr_;
};

}  // namespace tessera::launch::detail
