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
// a tree of these; all_to_all and messages go inside where the peer is on this
// host, else straight across.
// Order: sums inside a host first, in its order, then across: the same bits on
//        every rank and in every run, not those of one host.
#pragma once

#include "tessera/comm/algorithms/flat.h"
#include "tessera/comm/algorithms/host_map.h"

namespace tessera::comm::algorithms {

struct Hierarchy {
  HostMap map;
  Connection inside;  // the ranks of this host, in the map's order
  Connection across;  // all ranks of the group
};

// `choose` is asked for the part that goes across; kOwn: by its size.
Connection make_hierarchical(Hierarchy hierarchy, Chooser choose);

}  // namespace tessera::comm::algorithms
