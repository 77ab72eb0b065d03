// How far two cores are from each other: the time of a cache line's round trip.
//
// Two threads, pinned to the first two cores that this process may use, hand a
// line to and fro for one or two milliseconds; the fastest of several batches
// counts, so that a busy core does not show. On a virtual machine the figure
// flips between states within minutes, and every timing of shared memory with
// it: measure it just before and just after what is to be compared.
// Threads: any; the caller's own affinity stays.
#pragma once

#include <optional>

namespace tessera {

// Nothing where only one core may be used.
std::optional<double> cache_line_round_trip_ns();

}  // namespace tessera
