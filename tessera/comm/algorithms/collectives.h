// The verbs of a group by a named algorithm, over any transport.
//
//                  ring           recursive_doubling   tree
//   all_reduce     yes            yes                  yes
//   all_gather     yes            yes                  -
//   reduce_scatter yes            by halving           -
//   broadcast      -              -                    yes
//
// all_to_all is straight or aggregated, between hosts: see hierarchical.h.
// Every rank must ask for the same. The result is the same bits on every rank
// and in every run; see elements.h for its precision. Any number of ranks and
// any size, 0 included. Costs are in the algorithms' own headers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/algorithms/cost.h"
#include "tessera/comm/algorithms/elements.h"
#include "tessera/comm/verb.h"

namespace tessera::comm::algorithms {

enum class Algorithm {
  kOwn,  // "auto": the backend's own
  kRing,
  kRecursiveDoubling,
  kTree,
  kStraight,
  kAggregated,
};

const char* name_of(Algorithm algorithm);
std::optional<Algorithm> algorithm_of(const std::string& name);
std::vector<std::string> algorithm_names();
// Whether there is a way to do `verb` by it; kOwn does everything.
bool implements(Algorithm algorithm, Verb verb);

// REQUIRES, of all: implements(algorithm, verb), and not kOwn; cost_of: nor
// all_to_all, whose cost is not one of ranks alone.

// `partial`: partial_dtype() of `result`; the two may be one.
void all_reduce(Transport& transport, Algorithm algorithm,
                const Elements& partial, const Elements& result,
                const Reduction& reduction);
// `partial` is used up; `result` gets this rank's piece of it.
void reduce_scatter(Transport& transport, Algorithm algorithm,
                    const Elements& partial, const Bounds& bounds,
                    const Elements& result, const Reduction& reduction);
// From this rank's piece of `whole` to all of them.
void all_gather(Transport& transport, Algorithm algorithm,
                const Elements& whole, const Bounds& bounds);
void broadcast(Transport& transport, Algorithm algorithm,
               std::span<std::byte> data, int64_t root);

// In the plain case that partial sums are as wide as the elements. `bytes`: of
// the larger of what a rank gives and gets.
Cost cost_of(Verb verb, Algorithm algorithm, int64_t ranks, int64_t bytes);

}  // namespace tessera::comm::algorithms
