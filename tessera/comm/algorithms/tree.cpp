#include "tessera/comm/algorithms/tree.h"

namespace tessera::comm::algorithms {
namespace {

// Places are ranks, counted from the root around: the root's is 0. A parent is
// its child without the child's lowest bit.
class Tree {
 public:
  Tree(const Transport& transport, int64_t root)
      : size_(transport.size()),
        root_(root),
        place_((transport.rank() - root + size_) % size_) {}

  int64_t place() const { return place_; }
  bool is_root() const { return place_ == 0; }
  int64_t rank_at(int64_t place) const { return (place + root_) % size_; }
  // The distance to the parent; of the root, a power of two beyond all.
  int64_t reach() const {
    return is_root() ? int64_t{1} << doublings(size_) : place_ & -place_;
  }
  bool has_child(int64_t distance) const { return place_ + distance < size_; }
  int64_t parent() const { return rank_at(place_ - reach()); }
  int64_t child(int64_t distance) const { return rank_at(place_ + distance); }

 private:
  int64_t size_;
  int64_t root_;
  int64_t place_;
};

}  // namespace

void tree_broadcast(Transport& transport, std::span<std::byte> data,
                    int64_t root) {
  const Tree tree(transport, root);
  if (!tree.is_root()) recv_from(transport, data, tree.parent());
  for (int64_t distance = tree.reach() / 2; distance > 0; distance /= 2) {
    if (tree.has_child(distance)) {
      send_to(transport, data, tree.child(distance));
    }
  }
}

void tree_reduce(Transport& transport, const Elements& partial, ReduceOp op,
                 int64_t root) {
  const Tree tree(transport, root);
  const Scratch scratch(partial.numel, partial.dtype);
  for (int64_t distance = 1; distance < tree.reach(); distance *= 2) {
    if (!tree.has_child(distance)) break;
    recv_from(transport, scratch.elements().bytes(), tree.child(distance));
    reduce_into_lower(transport, partial, scratch.elements(), op);
  }
  if (!tree.is_root()) send_to(transport, partial.bytes(), tree.parent());
}

Cost tree_broadcast_cost(int64_t ranks, int64_t bytes) {
  const int64_t steps = doublings(ranks);
  return {.steps = steps, .bytes = steps * bytes};
}

Cost tree_reduce_cost(int64_t ranks, int64_t bytes) {
  const int64_t steps = doublings(ranks);
  return {.steps = steps, .bytes = steps * bytes, .reduced = steps * bytes};
}

}  // namespace tessera::comm::algorithms
