// Ranks of one host: started, supervised, ended together.
//
// Starts nproc processes of one program with TESSERA_RANK, TESSERA_WORLD_SIZE,
// TESSERA_LOCAL_RANK, TESSERA_LOCAL_WORLD_SIZE, TESSERA_NODE and TESSERA_STORE
// (for discover() and join()). The store is a file in memory that the ranks
// inherit: no network port, no name in a file system, nothing to clean up.
// Programs that know torchrun alone find RANK, WORLD_SIZE and its others, and
// a MASTER_PORT at the loopback that was free, which nothing here listens on.
// Failure: when a rank ends badly, the others get SIGTERM, and SIGKILL after
//         `grace`. The first cause is the last thing on stderr: last lines,
//         rank, host, signal or exit code, hint.
// Stopped: a rank that is stopped, as by SIGSTOP, is named within a second.
// Signals: SIGTERM, SIGINT, SIGHUP (as SIGTERM) and SIGUSR1 are passed on once,
//         for as long as the ranks take to write a checkpoint; a second one
//         ends all at once.
// Output: stderr that nobody reads does not stop the ranks (core/screen.h).
// Left over: nothing, but a rank that not even SIGKILL ends, which is named. A
//         rank that is ended takes what it started with it. Ranks die when the
//         launcher is killed, but not what they have started.
// Threads: one at a time; the calling thread must live until it returns.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::launch {

struct LocalOptions {
  int64_t nproc = 1;
  std::vector<std::string> argv;  // the program is looked up in PATH
  // Does what argv does, where that is this program: ranks are copies of this
  // process then (fork) and load no libraries, which takes 0.2 s of a core each
  // with LibTorch's. Where a copy would not be whole, since this process has
  // other threads or text on stderr that nobody has read, argv is executed.
  // OMP_NUM_THREADS is left as it is: such ranks share out the cores by
  // themselves.
  std::function<int()> as_copy = nullptr;
  // Added to the launcher's own variables, for every rank.
  std::map<std::string, std::string> environment;
  // Each rank's stderr also goes to log_dir/rank-N.log; "": nowhere. Leave it
  // empty for a program that writes its own logs.
  std::string log_dir;
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  // A rank that lost a peer (exit code 69) or aborted may be no first cause:
  // for so long the peers' own ends are waited for.
  std::chrono::milliseconds settle = std::chrono::milliseconds(250);
  // Set where a signal asked for the end, whatever the code is then.
  bool* was_asked = nullptr;
  // A rank that SIGKILL has not ended for so long is left behind, by name.
  std::chrono::milliseconds give_up = std::chrono::seconds(10);
};

// The exit code: 0; 75 when the ranks stopped after writing a checkpoint; the
// first failing rank's, 128+N where signal N killed it. Throws TS_CHECK_USAGE
// when the program cannot be started.
int run_local(const LocalOptions& options);

}  // namespace tessera::launch
