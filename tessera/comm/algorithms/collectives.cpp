#include "tessera/comm/algorithms/collectives.h"

#include <array>

#include "tessera/comm/algorithms/recursive.h"
#include "tessera/comm/algorithms/ring.h"
#include "tessera/comm/algorithms/tree.h"
#include "tessera/core/error.h"

namespace tessera::comm::algorithms {
namespace {

constexpr std::array kNames = {"auto", "ring",     "recursive_doubling",
                               "tree", "straight", "aggregated"};

void check_implemented(Algorithm algorithm, Verb verb) {
  TS_CHECK(algorithm != Algorithm::kOwn && implements(algorithm, verb),
           "there is no ", name_of(verb), " by ", name_of(algorithm), ".");
}

void ring_all_reduce(Transport& transport, const Elements& partial,
                     const Elements& result, const Reduction& reduction) {
  const Bounds bounds = even_bounds(result.numel, transport.size());
  const int64_t rank = transport.rank();
  ring_reduce_scatter(transport, partial, bounds, reduction.op);
  finish(pieces_of(partial, bounds, rank, rank + 1),
         pieces_of(result, bounds, rank, rank + 1), reduction);
  ring_all_gather(transport, result, bounds);
}

void tree_all_reduce(Transport& transport, const Elements& partial,
                     const Elements& result, const Reduction& reduction) {
  tree_reduce(transport, partial, reduction.op, /*root=*/0);
  if (transport.rank() == 0) finish(partial, result, reduction);
  tree_broadcast(transport, result.bytes(), /*root=*/0);
}

Cost all_reduce_cost(Algorithm algorithm, int64_t ranks, int64_t bytes) {
  if (algorithm == Algorithm::kRing) {
    return ring_reduce_scatter_cost(ranks, bytes) +
           ring_all_gather_cost(ranks, bytes);
  }
  if (algorithm == Algorithm::kTree) {
    return tree_reduce_cost(ranks, bytes) + tree_broadcast_cost(ranks, bytes);
  }
  return doubling_all_reduce_cost(ranks, bytes);
}

}  // namespace

const char* name_of(Algorithm algorithm) {
  return kNames.at(static_cast<size_t>(algorithm));
}

std::vector<std::string> algorithm_names() {
  return {kNames.begin(), kNames.end()};
}

std::optional<Algorithm> algorithm_of(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames.at(i)) return static_cast<Algorithm>(i);
  }
  return std::nullopt;
}

bool implements(Algorithm algorithm, Verb verb) {
  if (algorithm == Algorithm::kOwn) return true;
  const bool is_of_all_to_all =
      algorithm == Algorithm::kStraight || algorithm == Algorithm::kAggregated;
  if (is_of_all_to_all || verb == Verb::kAllToAll) {
    return is_of_all_to_all && verb == Verb::kAllToAll;
  }
  switch (verb) {
    case Verb::kAllReduce:
      return true;
    case Verb::kAllGather:
    case Verb::kReduceScatter:
      return algorithm != Algorithm::kTree;
    case Verb::kBroadcast:
      return algorithm == Algorithm::kTree;
    default:
      return false;
  }
}

void all_reduce(Transport& transport, Algorithm algorithm,
                const Elements& partial, const Elements& result,
                const Reduction& reduction) {
  check_implemented(algorithm, Verb::kAllReduce);
  if (algorithm == Algorithm::kRing) {
    return ring_all_reduce(transport, partial, result, reduction);
  }
  if (algorithm == Algorithm::kTree) {
    return tree_all_reduce(transport, partial, result, reduction);
  }
  doubling_all_reduce(transport, partial, reduction.op);
  finish(partial, result, reduction);
}

void reduce_scatter(Transport& transport, Algorithm algorithm,
                    const Elements& partial, const Bounds& bounds,
                    const Elements& result, const Reduction& reduction) {
  check_implemented(algorithm, Verb::kReduceScatter);
  if (algorithm == Algorithm::kRing) {
    ring_reduce_scatter(transport, partial, bounds, reduction.op);
  } else {
    halving_reduce_scatter(transport, partial, bounds, reduction.op);
  }
  const int64_t rank = transport.rank();
  finish(pieces_of(partial, bounds, rank, rank + 1), result, reduction);
}

void all_gather(Transport& transport, Algorithm algorithm,
                const Elements& whole, const Bounds& bounds) {
  check_implemented(algorithm, Verb::kAllGather);
  if (algorithm == Algorithm::kRing) {
    return ring_all_gather(transport, whole, bounds);
  }
  doubling_all_gather(transport, whole, bounds);
}

void broadcast(Transport& transport, Algorithm algorithm,
               std::span<std::byte> data, int64_t root) {
  check_implemented(algorithm, Verb::kBroadcast);
  tree_broadcast(transport, data, root);
}

Cost cost_of(Verb verb, Algorithm algorithm, int64_t ranks, int64_t bytes) {
  check_implemented(algorithm, verb);
  TS_CHECK(verb != Verb::kAllToAll, "the cost of all_to_all by ",
           name_of(algorithm), " is not one of ranks alone.");
  const bool is_ring = algorithm == Algorithm::kRing;
  if (verb == Verb::kAllReduce) return all_reduce_cost(algorithm, ranks, bytes);
  if (verb == Verb::kBroadcast) return tree_broadcast_cost(ranks, bytes);
  if (verb == Verb::kAllGather) {
    return is_ring ? ring_all_gather_cost(ranks, bytes)
                   : doubling_all_gather_cost(ranks, bytes);
  }
  return is_ring ? ring_reduce_scatter_cost(ranks, bytes)
                 : halving_reduce_scatter_cost(ranks, bytes);
}

}  // namespace tessera::comm::algorithms
