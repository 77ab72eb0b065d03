// What a call of MPI returned, as an exception in MPI's words.
#pragma once

namespace tessera::comm::mpi {

// Throws c10::DistBackendError, "CALL failed: ...", unless it is MPI_SUCCESS.
void check(int code, const char* call);

}  // namespace tessera::comm::mpi
