// Stands in for the backend where MPI was not found or not wanted.
#include "tessera/comm/mpi/mpi_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm::mpi {

bool is_built() { return false; }

std::string note() {
  return "this build has no MPI. Install libopenmpi-dev and openmpi-bin (or "
         "another MPI with its compiler mpicxx), configure again with "
         "-DTESSERA_MPI=ON and build; or use shm or gloo.";
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as the backend has it
Connection connect(Rendezvous, const Place&) {
  TS_CHECK_CONFIG(false, "comm.backend=mpi: ", note());
}

}  // namespace tessera::comm::mpi
