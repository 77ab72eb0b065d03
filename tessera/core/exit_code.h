// With which code an exception ends the program, whoever takes it: the rank
// that threw it, its peers, or who writes down how the run ended.
#pragma once

#include <exception>

#include "tessera/core/error.h"

namespace tessera {

// An Error's own; of a peer or a rendezvous that is gone kUnreachable, of files
// kInputOutput; else kFailed.
ExitCode exit_code_of(const std::exception& error);

}  // namespace tessera
