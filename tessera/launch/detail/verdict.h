// Why a run of local ranks ended, in the words for people that come last.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

namespace tessera::launch::detail {

struct RankEnd {
  int64_t rank = 0;
  int status = 0;  // of waitpid(2)
};

// 0..255, or 128+N for a rank that signal N killed.
int exit_code_of(int status);
// How near to the first cause such an end is: 0, it lost a peer (69); 1, it
// aborted, as a program does that does not catch what a lost peer throws; 2,
// whatever else.
int nearness(int status);
inline constexpr int kNearest = 2;
// Ended well: done, or stopped after writing a checkpoint (75).
bool is_orderly(int status);
// "SIGKILL".
std::string signal_name(int signal);
// How often the kernel killed a process for want of memory since it booted.
int64_t kernel_oom_kills();

struct Circumstances {
  int64_t world_size = 1;
  int64_t oom_kills = 0;  // while the ranks ran
  int passed_on = 0;      // a signal that the launcher passed on; 0: none
};

// The rank's last lines, and as last line who failed, where, how, and a hint.
std::string verdict(const RankEnd& end, const std::deque<std::string>& lines,
                    const Circumstances& around);

}  // namespace tessera::launch::detail
