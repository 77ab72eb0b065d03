#include "tessera/core/broken_pipe.h"

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

void ignore_file_size_limits() { ignore_unless_handled(SIGXFSZ); }

}  // namespace tessera
