// c10d::Backend over MPI: the ranks that mpirun, mpiexec or srun started.
//
// One thread of the process makes every call of MPI (progress.h); a group is a
// communicator of its own. Open MPI 4 and 5, MPICH, and what is like them.
// Order:  MPI chooses the order of a sum by size and ranks. fp16 and bf16 are
//         summed in fp32 and rounded once.
// Forms:  those of c10d that are lists, or go to one rank: C10dForms.
// Ranks:  those of MPI_COMM_WORLD: another numbering is refused.
// Start:  MPI is started with the first group and ended with the process, where
//         no rank failed; a program that starts MPI itself also ends it, and
//         before that closes its communicator.
// Errors: what MPI says, and time-outs (c10::DistBackendError), fail the Work
//         and all later calls of the group. A rank that ends with an error ends
//         the others through mpirun.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/rendezvous.h"

namespace tessera::comm::mpi {

// Where a rank stands in its group.
struct Place {
  std::string group;
  int64_t rank = 0;            // within the group
  std::vector<int64_t> ranks;  // global, ascending
  int64_t world_size = 1;
  std::chrono::milliseconds timeout;
  // Of one call of MPI: more goes in several.
  int64_t largest_count = INT_MAX;
};

// Whether MPI was found when this was built.
bool is_built();
// What it is; or why it is not there, and the way out.
std::string note();

// Blocks until every rank of the group is here.
Connection connect(Rendezvous rendezvous, const Place& place);

}  // namespace tessera::comm::mpi
