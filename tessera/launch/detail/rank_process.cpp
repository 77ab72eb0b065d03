#include "tessera/launch/detail/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::launch::detail {
namespace {

struct Pipe {
  Fd read;
  Fd write;
};

Pipe make_pipe() {
  int ends[2];
  TS_CHECK(pipe2(ends, O_CLOEXEC) == 0,
           "launch: no pipe for a rank: ", std::strerror(errno),
           ". Raise the limit of open files (ulimit -n).");
  return {Fd(ends[0]), Fd(ends[1])};
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (auto& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

struct ChildPlan {
  pid_t parent;
  int empty_input;
  int stderr_end;
  int status_end;  // carries errno when exec fails
  int inherited_fd;
  const sigset_t* signal_mask;
  char* const* argv;
  char* const* environment;
  const std::function<int()>& as_copy;
};

// All signals are held back: after a fork, the launcher's handlers would write
// into its pipe from the child.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_{};
};

// No handler of the launcher's may run in the child.
void reset_signals(const sigset_t& mask) {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action{};
    if (sigaction(number, nullptr, &action) != 0) continue;
    if (action.sa_handler != SIG_IGN || number == SIGPIPE) {
      signal(number, SIG_DFL);
    }
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
}

void close_what_exec_closes() {
  std::vector<int> numbers;
  for (const auto& each :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    numbers.push_back(std::stoi(each.path().filename()));
  }
  for (const int number : numbers) {
    const int flags = fcntl(number, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) != 0) close(number);
  }
}

// What is static ends as in any process; what the launcher has on its stack
// stays, come what may.
[[noreturn]] void go_on_as_copy(const ChildPlan& plan) noexcept {
  clearenv();
  for (char* const* each = plan.environment; *each != nullptr; ++each) {
    putenv(*each);
  }
  // Listing them needs a descriptor, of which there may be no more.
  for (const int end : {plan.empty_input, plan.stderr_end, plan.status_end}) {
    close(end);
  }
  close_what_exec_closes();
  std::exit(plan.as_copy());
}

// Between fork and exec: async-signal-safe calls alone. A copy is of a process
// with one thread.
[[noreturn]] void go_on_as_rank(const ChildPlan& plan) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) _exit(127);  // it died before the line above
  dup2(plan.empty_input, STDIN_FILENO);
  dup2(plan.stderr_end, STDERR_FILENO);
  if (plan.inherited_fd >= 0) fcntl(plan.inherited_fd, F_SETFD, 0);
  reset_signals(*plan.signal_mask);
  if (plan.as_copy) go_on_as_copy(plan);
  execvpe(plan.argv[0], plan.argv, plan.environment);
  const int error = errno;
  [[maybe_unused]] auto told = write(plan.status_end, &error, sizeof error);
  _exit(127);
}

// Empty when exec worked, or a copy goes on: the pipe closed without a word.
std::optional<int> error_of_exec(int status_pipe) {
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(status_pipe, &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  return got == sizeof error ? std::optional<int>(error) : std::nullopt;
}

}  // namespace

// By number: glibc 2.36 declares pidfd_open without extern "C".
Fd open_pidfd(pid_t pid) {
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

RankProcess::RankProcess(const RankProgram& program) {
  auto arguments = program.argv;
  auto variables = program.environment;
  const auto argv = pointers_to(arguments);
  const auto environment = pointers_to(variables);
  Pipe errors = make_pipe();
  Pipe status = make_pipe();
  const Fd empty(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (program.as_copy) {  // what is not written yet would be by both
    std::cout.flush();
    std::fflush(nullptr);
  }
  {
    const SignalsHeld held;
    const ChildPlan plan{.parent = getpid(),
                         .empty_input = empty.get(),
                         .stderr_end = errors.write.get(),
                         .status_end = status.write.get(),
                         .inherited_fd = program.inherited_fd,
                         .signal_mask = &held.before(),
                         .argv = argv.data(),
                         .environment = environment.data(),
                         .as_copy = program.as_copy};
    pid_ = fork();
    if (pid_ == 0) go_on_as_rank(plan);
  }
  TS_CHECK(pid_ > 0,
           "launch: cannot start another process: ", std::strerror(errno),
           ". Start fewer ranks, or raise ulimit -u.");
  status.write = Fd();
  if (const auto error = error_of_exec(status.read.get())) {
    waitpid(std::exchange(pid_, -1), nullptr, 0);
    TS_CHECK_USAGE(false, "launch: cannot start '", program.argv.front(),
                   "': ", std::strerror(*error), ".");
  }
  pidfd_ = open_pidfd(pid_);
  stderr_ = std::move(errors.read);
  if (!pidfd_.open()) {
    const int error = errno;
    kill(-pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
    TS_CHECK(false, "launch: no pidfd for a rank: ", std::strerror(error),
             ". Tessera needs Linux 5.3 and enough open files (ulimit -n).");
  }
  fcntl(stderr_.get(), F_SETFL, O_NONBLOCK);
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      stderr_(std::move(other.stderr_)) {}

RankProcess::~RankProcess() {
  if (!running()) return;
  send(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void RankProcess::send(int signal) const {
  if (!running()) return;
  kill(-pid_, signal);
  // A stopped process would keep a SIGTERM pending.
  if (signal != SIGKILL) kill(-pid_, SIGCONT);
}

std::optional<int> RankProcess::take_stop() const {
  siginfo_t info{};
  constexpr int kHow = WSTOPPED | WCONTINUED | WNOHANG;
  if (!running() || waitid(P_PID, static_cast<id_t>(pid_), &info, kHow) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  return info.si_code == CLD_CONTINUED ? 0 : info.si_status;
}

int RankProcess::reap() {
  // While the leader is not reaped, its number cannot name another group.
  kill(-pid_, SIGKILL);
  int status = 0;
  pid_t ended = 0;
  do {
    ended = waitpid(pid_, &status, 0);
  } while (ended < 0 && errno == EINTR);
  const int error = errno;
  const pid_t pid = std::exchange(pid_, -1);
  pidfd_ = Fd();
  TS_CHECK(ended == pid, "launch: how process ", pid,
           " ended is not known: ", std::strerror(error),
           ". Something else in this program waits for its children.");
  return status;
}

}  // namespace tessera::launch::detail
