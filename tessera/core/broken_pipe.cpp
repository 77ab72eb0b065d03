#include "tessera/core/broken_pipe.h"

#include <poll.h>

#include <csignal>

namespace tessera {

namespace {

void ignore_unless_handled(int signal) {
  struct sigaction action{};
  sigaction(signal, nullptr, &action);
  if (action.sa_handler == SIG_DFL) std::signal(signal, SIG_IGN);
}

}  // namespace

void ignore_broken_pipes() { ignore_unless_handled(SIGPIPE); }

bool is_broken_pipe(int descriptor) {
  pollfd watched{.fd = descriptor, .events = POLLOUT, .revents = 0};
  return ::poll(&watched, 1, /*timeout=*/0) > 0 &&
         (watched.revents & (POLLERR | POLLHUP)) != 0;
}

void ignore_file_size_limits() { ignore_unless_handled(SIGXFSZ); }

}  // namespace tessera
