// The job of a rank that MPICH's mpiexec (hydra) started.
#pragma once

#include <string>

namespace tessera::launch {

// Hydra gives a job no name, but starts the ranks of a host from one process of
// its own: "hydra-PID" of that ancestor of this process, or "" without one.
std::string hydra_job();

}  // namespace tessera::launch
