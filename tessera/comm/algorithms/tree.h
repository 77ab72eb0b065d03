// Binomial tree: the ranks that have it double in every step.
//
// p: ranks; n: bytes; lg p rounded up. The children of a rank lie at distances
// 1, 2, 4, ... behind it (counted from the root), so that whatever it has
// summed up comes from ranks side by side.
//
//   broadcast   lg p (alpha + n beta)
//   reduce      lg p (alpha + n (beta + gamma)), to the root alone
//   all_reduce  reduce to rank 0, broadcast from there
//
// Fewest steps for a broadcast; the root's link carries all: small messages.
// Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective
//         Communication Operations in MPICH", 2005, sections 4.3 and 4.6.
#pragma once

#include "tessera/comm/algorithms/cost.h"
#include "tessera/comm/algorithms/elements.h"

namespace tessera::comm::algorithms {

void tree_broadcast(Transport& transport, std::span<std::byte> data,
                    int64_t root);
// Afterwards `partial` of the root is reduced; the others' is used up.
void tree_reduce(Transport& transport, const Elements& partial, ReduceOp op,
                 int64_t root);

Cost tree_broadcast_cost(int64_t ranks, int64_t bytes);
Cost tree_reduce_cost(int64_t ranks, int64_t bytes);

}  // namespace tessera::comm::algorithms
