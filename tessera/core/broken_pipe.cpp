#include "tessera/core/broken_pipe.h"

#include <csignal>

namespace tessera {

void ignore_broken_pipes() {
  struct sigaction action{};
  sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace tessera
