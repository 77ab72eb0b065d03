// Sees the end of other processes at once: one thread of this process sleeps on
// their pidfds (kill(pid, 0) would not do: a process that its launcher has not
// reaped still exists).
//
// Threads: any.
// Errors:  TS_CHECK where no descriptor is left. Where the system gives no
//          pidfds (an old kernel, a sandbox) nobody is watched, and a death is
//          found by the time-out.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>

namespace tessera::comm::shm {

// Ends the watching with it; waits for a call that is under way.
class Watched {
 public:
  virtual ~Watched() = default;
};

// Calls `on_end` once, when process `pid` has ended: on the watching thread, or
// on this one if there is no such process any more.
std::unique_ptr<Watched> watch_process(pid_t pid, std::function<void()> on_end);

}  // namespace tessera::comm::shm
