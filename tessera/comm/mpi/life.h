// MPI in this process, from its start to its end, without MPI's own header.
//
// Errors:  c10::DistBackendError with the call and MPI's words.
// Threads: one, the progress thread, for everything here.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm::mpi {

// "Open MPI 4.1.4" or "MPICH 4.0.2": what this was compiled against.
std::string library_name();

// This process among those that mpirun started.
struct World {
  int64_t rank = 0;
  int64_t size = 1;
  int64_t largest_tag = 32767;  // every MPI has tags up to this one
  bool started_here = false;    // not by the program, who else ends it
};

// Starts MPI, unless the program has done so: then at a level of threads that
// lets the progress thread make calls.
World start();
// Lets MPI go on with what it has under way, unless it has ended.
void nudge();
// Ends MPI, if nobody has. REQUIRES: started here; every group is closed.
void stop();

}  // namespace tessera::comm::mpi
