// What this host computes with, and how far two of its cores are apart.
//
// Threads: any; the caller's own affinity stays.
#pragma once

#include <optional>
#include <string>

namespace tessera {

// As /proc/cpuinfo has it; "an unknown processor" where it has nothing.
std::string processor_name();

// Of Intel's make: what is fastest there was measured there
// (bench/results/collectives_2core_intel_2026-11-24.md).
bool is_intel();

// From one core to another and back. Two threads, pinned to the first two cores
// that this process may use, hand a line back and forth for some
// milliseconds; the fastest of several batches counts, so that a busy core does
// not show. Nothing where only one core may be used.
// On a virtual machine the figure flips between states within minutes, and
// every timing of shared memory with it: measure it just before and just after
// what is to be compared.
std::optional<double> cache_line_round_trip_ns();

}  // namespace tessera
