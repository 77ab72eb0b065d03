// Recursive doubling and halving: partners at distances 1, 2, 4, ... swap.
//
// p: ranks; n: bytes of the whole; 2^k the largest power of two within p.
//
//   all_reduce      k (alpha + n (beta + gamma))     doubling, whole vectors
//   reduce_scatter  k alpha + (p - 1)/p n (beta + gamma)     halving
//   all_gather      k alpha + (p - 1)/p n beta               doubling
//
// Where p is no power of two, r = p - 2^k ranks stand aside: rank 2i, i < r,
// hands its part to rank 2i + 1 before, and gets its result after. That is two
// steps more, of n each in all_reduce, of n and n/p in the others, whose swaps
// and sums are then of sum over j < k of (2^j + min(r, 2^j)) n/p.
// Fewest steps for all_reduce: small messages; halving and doubling: any.
// Source: Thakur, Rabenseifner, Gropp, 2005, sections 4.1, 4.4 and 4.5;
//         Rabenseifner, "Optimization of Collective Reduction Operations",
//         2004.
#pragma once

#include "tessera/comm/algorithms/cost.h"
#include "tessera/comm/algorithms/elements.h"

namespace tessera::comm::algorithms {

// Afterwards `partial` is reduced, on every rank.
void doubling_all_reduce(Transport& transport, const Elements& partial,
                         ReduceOp op);
// Afterwards this rank's piece of `partial` is reduced; the others are used up.
void halving_reduce_scatter(Transport& transport, const Elements& partial,
                            const Bounds& bounds, ReduceOp op);
// From this rank's piece of `whole` to all of them.
void doubling_all_gather(Transport& transport, const Elements& whole,
                         const Bounds& bounds);

Cost doubling_all_reduce_cost(int64_t ranks, int64_t bytes);
// For p that divides n; else pieces count as long as the longest.
Cost halving_reduce_scatter_cost(int64_t ranks, int64_t bytes);
Cost doubling_all_gather_cost(int64_t ranks, int64_t bytes);

}  // namespace tessera::comm::algorithms
