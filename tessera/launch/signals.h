// What a process does about SIGTERM, SIGINT, SIGUSR1 and SIGHUP, beside ending.
#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::launch {

// A request to stop, by one of these; not by a SIGHUP that is ignored (nohup).
//
// While one lives, the first signal sets a flag that the trainer polls at the
// boundaries of steps and agrees on with all ranks; a second one ends the
// process at once with 128+N. Signals that come within kMerge of the first are
// the same request: a terminal and a launcher often both send one.
// Threads: ranks that are threads share the one of their process; polling is
//         free and safe from any thread.
class StopRequest {
 public:
  static constexpr auto kMerge = std::chrono::milliseconds(300);

  // REQUIRES: no other StopRequest lives.
  StopRequest();
  ~StopRequest();  // gives the signals back to whom they belonged
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  bool requested() const { return signal() != 0; }
  int signal() const;  // the first one, or 0

 private:
  std::vector<struct sigaction> before_;
};

// While one lives, one of these that is not ignored ends the process as without
// it, but `tidy` runs first, on a thread of its own, beside what the process
// does; not once its destructor has begun. SIGPIPE is ignored meanwhile.
// REQUIRES: no StopRequest and no launcher (local.h) meanwhile.
class TidyUp {
 public:
  explicit TidyUp(std::function<void()> tidy);
  ~TidyUp();
  TidyUp(const TidyUp&) = delete;
  TidyUp& operator=(const TidyUp&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::launch
