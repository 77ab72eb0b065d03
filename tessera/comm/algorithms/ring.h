// Ring: each rank hands pieces to the next, for p - 1 steps.
//
// p: ranks; n: bytes of the whole. In step s rank r sends on the piece that it
// received in the step before, so that every link is used in every step.
//
//   reduce_scatter  (p - 1) alpha + (p - 1)/p n (beta + gamma)
//   all_gather      (p - 1) alpha + (p - 1)/p n beta
//   all_reduce      both, one after the other
//
// No algorithm sends fewer bytes; the steps are many: for large messages.
// Source: Patarasu, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters
//         of Workstations", 2009.
#pragma once

#include "tessera/comm/algorithms/cost.h"
#include "tessera/comm/algorithms/elements.h"

namespace tessera::comm::algorithms {

// Afterwards this rank's piece of `partial` is reduced; the others are used up.
void ring_reduce_scatter(Transport& transport, const Elements& partial,
                         const Bounds& bounds, ReduceOp op);
// From this rank's piece of `whole` to all of them.
void ring_all_gather(Transport& transport, const Elements& whole,
                     const Bounds& bounds);

// For p that divides n; else pieces count as long as the longest.
Cost ring_reduce_scatter_cost(int64_t ranks, int64_t bytes);
Cost ring_all_gather_cost(int64_t ranks, int64_t bytes);

}  // namespace tessera::comm::algorithms
