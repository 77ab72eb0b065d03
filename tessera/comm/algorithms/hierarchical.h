// Collectives of ranks on several hosts: as much as can be inside each host,
// the rest across by an algorithm over messages.
//
// H hosts of L ranks, p = H L, n bytes. Where hosts have equal numbers of
// ranks, rank i of each host takes part i across, so that all links are used:
//
//   all_reduce      reduce_scatter inside, all_reduce of n/L across, all_gather
//                   inside: 2 (H - 1)/H n bytes out of a host, where a flat
//                   ring needs 2 (p - 1)/p n, and 2 (H - 1) steps for 2 (p - 1)
//   reduce_scatter  inside, then across: (H - 1)/H n out of a host
//   all_gather      across, then inside: as many
//
// Where they are not equal, the first rank of each host speaks for all of it:
// the same bytes, over its link alone. broadcast goes from host to host along
// a tree of these; messages go inside where the peer is on this host, else
// straight across.
//
// all_to_all goes inside where it can, else in one of two forms, chosen for
// each rank and host by the bytes m that the host has for the rank. Whoever
// takes part knows them: the rank from its own splits, the host's ranks from
// each other's, which they gather inside first. No header goes across.
//   straight    each rank of the host sends its own: L messages
//   aggregated  inside they give theirs to the one at the rank's place, which
//               sends all of them: one message. Of equal hosts alone
// A rank sends (H - 1) L messages or H - 1; the same bytes leave the host.
// Memory: while it lasts, what a rank gives and gets inside and 8 L p bytes of
//         splits; of the aggregated form also what it hands over, what it takes
//         for others, (H - 1) m at most, and a message each way, m.
// Source: DeepSpeed-MoE, arXiv 2201.05596, and the 2DH of Tutel, arXiv
//         2206.03382; here the ranks of a host may differ in their
//         rows, and large rows keep the straight form.
// Order: sums inside a host first, in its order, then across: the same bits on
//        every rank and in every run, not those of one host.
#pragma once

#include "tessera/comm/algorithms/flat.h"
#include "tessera/comm/host_map.h"

namespace tessera::comm::algorithms {

struct Hierarchy {
  HostMap map;
  Connection inside;  // the ranks of this host, in the map's order
  Connection across;  // all ranks of the group
};

// `choose` is asked for the part that goes across, of all_to_all for what a
// host has for a rank of another; kOwn: by its size.
Connection make_hierarchical(Hierarchy hierarchy, Chooser choose);

}  // namespace tessera::comm::algorithms
