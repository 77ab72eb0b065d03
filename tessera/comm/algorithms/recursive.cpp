#include "tessera/comm/algorithms/recursive.h"

#include <algorithm>
#include <bit>

namespace tessera::comm::algorithms {
namespace {

// The ranks that swap, numbered 0 .. 2^k - 1: rank 2i + 1 for itself and 2i
// while i < aside, then every rank. So a number stands for ranks side by side.
class Fold {
 public:
  explicit Fold(const Transport& transport)
      : Fold(transport.size(), transport.rank()) {}
  explicit Fold(int64_t size, int64_t rank = 0)
      : active_(
            static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size)))),
        aside_(size - active_),
        rank_(rank) {}

  int64_t active() const { return active_; }
  int64_t aside() const { return aside_; }
  bool stands_aside() const { return rank_ < 2 * aside_ && rank_ % 2 == 0; }
  // Does it speak for the rank before it too?
  bool speaks_for_two() const { return rank_ < 2 * aside_ && rank_ % 2 == 1; }
  int64_t number() const {
    return rank_ < 2 * aside_ ? rank_ / 2 : rank_ - aside_;
  }
  int64_t rank_of(int64_t number) const {
    return number < aside_ ? 2 * number + 1 : number + aside_;
  }
  // The first of the ranks, or pieces, that `number` stands for.
  int64_t first(int64_t number) const {
    return number + std::min(number, aside_);
  }

 private:
  int64_t active_;
  int64_t aside_;
  int64_t rank_;
};

// The pieces of numbers [block, block + count).
Elements block_of(const Elements& whole, const Bounds& bounds, const Fold& fold,
                  int64_t block, int64_t count) {
  return pieces_of(whole, bounds, fold.first(block), fold.first(block + count));
}

// What this rank and the one before it hold, on the one that speaks for both.
void fold_in(Transport& transport, const Fold& fold, const Elements& partial,
             const Elements& scratch, ReduceOp op) {
  const int64_t rank = transport.rank();
  if (fold.stands_aside()) send_to(transport, partial.bytes(), rank + 1);
  if (!fold.speaks_for_two()) return;
  recv_from(transport, scratch.bytes(), rank - 1);
  reduce_into_higher(transport, scratch, partial, op);
}

// `result` goes from the rank that speaks for two to the one before it.
void fold_out(Transport& transport, const Fold& fold, const Elements& result) {
  const int64_t rank = transport.rank();
  if (fold.stands_aside()) recv_from(transport, result.bytes(), rank + 1);
  if (fold.speaks_for_two()) send_to(transport, result.bytes(), rank - 1);
}

void reduce_in_order(Transport& transport, bool received_is_lower,
                     const Elements& received, const Elements& own,
                     ReduceOp op) {
  if (received_is_lower)
    return reduce_into_higher(transport, received, own, op);
  reduce_into_lower(transport, own, received, op);
}

// Pieces that number 0 receives, which is on the longest way.
int64_t pieces_received(const Fold& fold) {
  int64_t pieces = 0;
  for (int64_t mask = 1; mask < fold.active(); mask *= 2) {
    pieces += fold.first(mask);
  }
  return pieces;
}

int64_t longest_piece(int64_t ranks, int64_t bytes) {
  return (bytes + ranks - 1) / ranks;
}

}  // namespace

void doubling_all_reduce(Transport& transport, const Elements& partial,
                         ReduceOp op) {
  const Fold fold(transport);
  const Scratch scratch(partial.numel, partial.dtype);
  const Elements received = scratch.elements();
  fold_in(transport, fold, partial, received, op);
  if (!fold.stands_aside()) {
    for (int64_t mask = 1; mask < fold.active(); mask *= 2) {
      const int64_t partner = fold.number() ^ mask;
      const int64_t peer = fold.rank_of(partner);
      exchange(transport, partial.bytes(), peer, received.bytes(), peer);
      reduce_in_order(transport, partner < fold.number(), received, partial,
                      op);
    }
  }
  fold_out(transport, fold, partial);
}

void halving_reduce_scatter(Transport& transport, const Elements& partial,
                            const Bounds& bounds, ReduceOp op) {
  const Fold fold(transport);
  const Scratch scratch(partial.numel, partial.dtype);
  fold_in(transport, fold, partial, scratch.elements(), op);
  if (!fold.stands_aside()) {
    for (int64_t mask = fold.active() / 2; mask > 0; mask /= 2) {
      // Each keeps the half with its own number, and gives the other away.
      const int64_t partner = fold.number() ^ mask;
      const Elements kept =
          block_of(partial, bounds, fold, fold.number() & -mask, mask);
      const Elements given =
          block_of(partial, bounds, fold, partner & -mask, mask);
      const Elements received = scratch.elements().part(0, kept.numel);
      const int64_t peer = fold.rank_of(partner);
      exchange(transport, given.bytes(), peer, received.bytes(), peer);
      reduce_in_order(transport, partner < fold.number(), received, kept, op);
    }
  }
  // The piece of the one that stood aside.
  const int64_t aside =
      fold.speaks_for_two() ? transport.rank() - 1 : transport.rank();
  fold_out(transport, fold, pieces_of(partial, bounds, aside, aside + 1));
}

void doubling_all_gather(Transport& transport, const Elements& whole,
                         const Bounds& bounds) {
  const Fold fold(transport);
  const int64_t rank = transport.rank();
  if (fold.stands_aside()) {
    send_to(transport, pieces_of(whole, bounds, rank, rank + 1).bytes(),
            rank + 1);
  } else {
    if (fold.speaks_for_two()) {
      recv_from(transport, pieces_of(whole, bounds, rank - 1, rank).bytes(),
                rank - 1);
    }
    for (int64_t mask = 1; mask < fold.active(); mask *= 2) {
      const int64_t partner = fold.number() ^ mask;
      const int64_t peer = fold.rank_of(partner);
      exchange(
          transport,
          block_of(whole, bounds, fold, fold.number() & -mask, mask).bytes(),
          peer, block_of(whole, bounds, fold, partner & -mask, mask).bytes(),
          peer);
    }
  }
  fold_out(transport, fold, whole);
}

Cost doubling_all_reduce_cost(int64_t ranks, int64_t bytes) {
  const Fold fold(ranks);
  const int64_t swaps = doublings(fold.active());
  const int64_t before = fold.aside() > 0 ? 1 : 0;
  return {.steps = swaps + 2 * before,
          .bytes = (swaps + 2 * before) * bytes,
          .reduced = (swaps + before) * bytes};
}

Cost halving_reduce_scatter_cost(int64_t ranks, int64_t bytes) {
  const Fold fold(ranks);
  const int64_t piece = longest_piece(ranks, bytes);
  Cost cost{.steps = doublings(fold.active()),
            .bytes = pieces_received(fold) * piece,
            .reduced = pieces_received(fold) * piece};
  if (fold.aside() > 0) {
    cost = cost + Cost{.steps = 2, .bytes = bytes + piece, .reduced = bytes};
  }
  return cost;
}

Cost doubling_all_gather_cost(int64_t ranks, int64_t bytes) {
  const Fold fold(ranks);
  const int64_t piece = longest_piece(ranks, bytes);
  Cost cost{.steps = doublings(fold.active()),
            .bytes = pieces_received(fold) * piece};
  if (fold.aside() > 0) {
    cost = cost + Cost{.steps = 2, .bytes = piece + bytes};
  }
  return cost;
}

}  // namespace tessera::comm::algorithms
