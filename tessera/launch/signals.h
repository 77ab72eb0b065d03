// A request to stop, by SIGTERM, SIGINT, SIGUSR1, or SIGHUP unless it is
// ignored (nohup).
//
// While one lives, the first signal sets a flag that the trainer polls at the
// boundaries of steps and agrees on with all ranks; a second one ends the
// process at once with 128+N. Signals that come within kMerge of the first are
// the same request: a terminal and a launcher often both send one.
// Threads: ranks that are threads share the one of their process; polling is
//         free and safe from any thread.
#pragma once

#include <chrono>
#include <csignal>
#include <vector>

namespace tessera::launch {

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

}  // namespace tessera::launch
