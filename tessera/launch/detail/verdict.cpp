#include "tessera/launch/detail/verdict.h"

#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "tessera/core/error.h"
#include "tessera/core/host.h"

namespace tessera::launch::detail {
namespace {

std::string hint_for_signal(int signal, const Circumstances& around) {
  if (signal == around.passed_on) {
    return "The launcher passed this signal on; the program ended without "
           "writing a checkpoint.";
  }
  switch (signal) {
    case SIGKILL:
      return around.oom_kills > 0
                 ? "The kernel killed a process for want of memory meanwhile: "
                   "this host or its memory limit is too small. Lower "
                   "batch.micro, or use fewer ranks."
                 : "The kernel counts no kill for want of memory: somebody, or "
                   "a batch system, sent this signal.";
    case SIGBUS:
      return "A mapped file was cut short, or /dev/shm is full (df /dev/shm).";
    case SIGILL:
      return "The program uses instructions that this processor lacks.";
    case SIGXCPU:
    case SIGXFSZ:
      return "A limit of the shell was reached (ulimit -a).";
    default:
      return "";
  }
}

std::string manner(int status, const Circumstances& around) {
  if (!WIFSIGNALED(status)) {
    return c10::str("exit code ", exit_code_of(status), ".");
  }
  const int signal = WTERMSIG(status);
  const std::string hint = hint_for_signal(signal, around);
  return c10::str("killed by ", signal_name(signal), " (exit code ",
                  exit_code_of(status), ").", hint.empty() ? "" : " ", hint);
}

}  // namespace

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int nearness(int status) {
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGABRT ? 1 : 2;
  const bool lost_a_peer =
      WEXITSTATUS(status) == static_cast<int>(ExitCode::kUnreachable);
  return lost_a_peer ? 0 : 2;
}

bool is_orderly(int status) {
  return !WIFSIGNALED(status) &&
         (WEXITSTATUS(status) == 0 ||
          WEXITSTATUS(status) == static_cast<int>(ExitCode::kStopped));
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? c10::str("SIG", name) : c10::str("signal ", signal);
}

int64_t kernel_oom_kills() {
  std::ifstream counters("/proc/vmstat");
  std::string name;
  int64_t value = 0;
  while (counters >> name >> value) {
    if (name == "oom_kill") return value;
  }
  return 0;
}

std::string verdict(const RankEnd& end, const std::deque<std::string>& lines,
                    const Circumstances& around) {
  std::string text;
  if (lines.empty()) {
    text = c10::str("tessera: rank ", end.rank, " wrote nothing to stderr\n");
  } else {
    text = c10::str("tessera: last lines of rank ", end.rank, ":\n");
    for (const auto& line : lines) text += c10::str("  | ", line, "\n");
  }
  return text + c10::str("tessera: rank ", end.rank, " of ", around.world_size,
                         " on ", host_name(),
                         " failed first: ", manner(end.status, around), "\n");
}

}  // namespace tessera::launch::detail
