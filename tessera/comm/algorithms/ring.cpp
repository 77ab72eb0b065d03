#include "tessera/comm/algorithms/ring.h"

#include <algorithm>

namespace tessera::comm::algorithms {
namespace {

// Where rank r stands: what it sends in step s its neighbour receives in s.
struct Ring {
  explicit Ring(const Transport& transport)
      : rank(transport.rank()), size(transport.size()) {}
  int64_t next() const { return (rank + 1) % size; }
  int64_t before() const { return (rank + size - 1) % size; }
  // The piece `back` places before that of this rank; back in 0 .. 2 size.
  int64_t piece(int64_t back) const { return (rank + 2 * size - back) % size; }

  int64_t rank;
  int64_t size;
};

int64_t longest(const Bounds& bounds) {
  int64_t most = 0;
  for (size_t i = 1; i < bounds.size(); ++i) {
    most = std::max(most, bounds[i] - bounds[i - 1]);
  }
  return most;
}

int64_t all_but_one(int64_t ranks, int64_t bytes) {
  return (ranks - 1) * ((bytes + ranks - 1) / ranks);
}

}  // namespace

void ring_reduce_scatter(Transport& transport, const Elements& partial,
                         const Bounds& bounds, ReduceOp op) {
  const Ring ring(transport);
  const Scratch scratch(longest(bounds), partial.dtype);
  for (int64_t step = 1; step < ring.size; ++step) {
    // A piece starts behind its owner and comes to it last.
    const int64_t out = ring.piece(step);
    const int64_t in = ring.piece(step + 1);
    const Elements sent = pieces_of(partial, bounds, out, out + 1);
    const Elements own = pieces_of(partial, bounds, in, in + 1);
    const Elements received = scratch.elements().part(0, own.numel);
    exchange(transport, sent.bytes(), ring.next(), received.bytes(),
             ring.before());
    reduce_into_higher(transport, received, own, op);
  }
}

void ring_all_gather(Transport& transport, const Elements& whole,
                     const Bounds& bounds) {
  const Ring ring(transport);
  for (int64_t step = 0; step + 1 < ring.size; ++step) {
    const int64_t out = ring.piece(step);
    const int64_t in = ring.piece(step + 1);
    exchange(transport, pieces_of(whole, bounds, out, out + 1).bytes(),
             ring.next(), pieces_of(whole, bounds, in, in + 1).bytes(),
             ring.before());
  }
}

Cost ring_reduce_scatter_cost(int64_t ranks, int64_t bytes) {
  const int64_t moved = all_but_one(ranks, bytes);
  return {.steps = ranks - 1, .bytes = moved, .reduced = moved};
}

Cost ring_all_gather_cost(int64_t ranks, int64_t bytes) {
  return {.steps = ranks - 1, .bytes = all_but_one(ranks, bytes)};
}

}  // namespace tessera::comm::algorithms
