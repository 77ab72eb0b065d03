#include "tessera/launch/detail/signal_queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::launch::detail {
namespace {

std::atomic<int> write_fd{-1};  // of the queue that lives

void on_signal(int signal) {
  const int saved_errno = errno;
  const auto byte = static_cast<unsigned char>(signal);
  // A full pipe holds more signals than are ever asked for.
  [[maybe_unused]] const auto written = write(write_fd, &byte, 1);
  errno = saved_errno;
}

}  // namespace

SignalQueue::SignalQueue() {
  int ends[2];
  TS_CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0,
           "launch: no pipe for signals: ", std::strerror(errno), ".");
  read_end_ = Fd(ends[0]);
  write_end_ = Fd(ends[1]);
  write_fd = write_end_.get();
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
    take(signal, &on_signal);
  }
  take(SIGPIPE, SIG_IGN);
  struct sigaction plain{};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &plain, &before_[SIGCHLD]);
}

SignalQueue::~SignalQueue() {
  close();
  write_fd = -1;
}

void SignalQueue::close() {
  for (const auto& [signal, action] : std::exchange(before_, {})) {
    sigaction(signal, &action, nullptr);
  }
}

int SignalQueue::next() const {
  unsigned char signal = 0;
  return read(fd(), &signal, 1) == 1 ? signal : 0;
}

void SignalQueue::take(int signal, void (*handler)(int)) {
  struct sigaction action{}, before{};
  action.sa_handler = handler;
  sigaction(signal, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return;
  sigaction(signal, &action, nullptr);
  before_[signal] = before;
}

}  // namespace tessera::launch::detail
