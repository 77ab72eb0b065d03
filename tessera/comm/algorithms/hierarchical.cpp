#include "tessera/comm/algorithms/hierarchical.h"

#include "tessera/comm/algorithms/hierarchical_collectives.h"

namespace tessera::comm::algorithms {
namespace {

// Across hosts a step costs as much as this many bytes, or more.
constexpr int64_t kSmallBytes = 64 << 10;
// Up to here from a host to a rank of another, one message is faster than one
// from each rank, though its bytes go through memory first.
constexpr int64_t kAggregatedBytes = 512 << 10;

}  // namespace

Hierarchical::Hierarchical(Hierarchy hierarchy, Chooser choose)
    : map_(std::move(hierarchy.map)),
      inside_(std::move(hierarchy.inside)),
      across_(std::move(hierarchy.across)),
      choose_(std::move(choose)),
      everyone_(across_.backend) {
  if (map_.is_even()) {
    bridge_.emplace(everyone_, map_.column());
  } else if (map_.local == 0) {
    bridge_.emplace(everyone_, map_.leaders());
  }
  if (map_.local == 0) leaders_.emplace(everyone_, map_.leaders());
}

Algorithm Hierarchical::choose(Verb verb, int64_t bytes) const {
  const Algorithm chosen = choose_(verb, bytes);
  if (chosen != Algorithm::kOwn && implements(chosen, verb)) return chosen;
  if (verb == Verb::kAllToAll) {
    return bytes <= kAggregatedBytes ? Algorithm::kAggregated
                                     : Algorithm::kStraight;
  }
  return bytes <= kSmallBytes ? Algorithm::kRecursiveDoubling
                              : Algorithm::kRing;
}

BlockingCollectives::Message Hierarchical::send(
    std::vector<at::Tensor>& tensors, int peer, int tag) {
  const auto [host, local] = map_.place_of(peer);
  return host == map_.host
             ? inside_.backend->send(tensors, static_cast<int>(local), tag)
             : across_.backend->send(tensors, peer, tag);
}

BlockingCollectives::Message Hierarchical::recv(
    std::vector<at::Tensor>& tensors, int peer, int tag) {
  const auto [host, local] = map_.place_of(peer);
  return host == map_.host
             ? inside_.backend->recv(tensors, static_cast<int>(local), tag)
             : across_.backend->recv(tensors, peer, tag);
}

std::vector<int64_t> Hierarchical::by_place() const {
  std::vector<int64_t> order;
  for (int64_t local = 0; local < map_.num_locals(); ++local) {
    for (const auto& ranks : map_.members) order.push_back(ranks[local]);
  }
  return order;
}

std::vector<int64_t> Hierarchical::by_host() const {
  std::vector<int64_t> order;
  for (const auto& ranks : map_.members) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  return order;
}

Bounds Hierarchical::host_bounds(int64_t piece) const {
  Bounds bounds{0};
  for (const auto& ranks : map_.members) {
    bounds.push_back(bounds.back() +
                     piece * static_cast<int64_t>(ranks.size()));
  }
  return bounds;
}

void Hierarchical::all_gather_by_parts(const at::Tensor& output,
                                       const at::Tensor& in) {
  const int64_t piece = in.numel();
  const int64_t hosts = map_.num_hosts();
  const ScratchTensor column(empty_of(hosts * piece, at::kByte));
  const Elements own = column.elements();
  copy(elements_of(in), own.part(map_.host * piece, (map_.host + 1) * piece));
  algorithms::all_gather(*bridge_, choose(Verb::kAllGather, own.numel), own,
                         even_bounds(own.numel, hosts));

  const at::Tensor all = empty_of(map_.num_locals() * own.numel, at::kByte);
  call_all_gather(*inside_.backend, all, column.tensor());
  const Elements from = elements_of(all), to = elements_of(bytes_of(output));
  int64_t at = 0;
  for (int64_t rank : by_place()) {
    copy(from.part(at, at + piece), to.part(rank * piece, (rank + 1) * piece));
    at += piece;
  }
}

void Hierarchical::all_gather_by_leaders(const at::Tensor& output,
                                         const at::Tensor& in) {
  const int64_t piece = in.numel();
  const ScratchTensor scratch(empty_of(everyone_.size() * piece, at::kByte));
  const at::Tensor& all = scratch.tensor();
  const Bounds bounds = host_bounds(piece);
  const at::Tensor own =
      all.narrow(0, bounds[map_.host], map_.num_locals() * piece);
  call_all_gather(*inside_.backend, own, in);
  if (bridge_) {
    algorithms::all_gather(*bridge_, choose(Verb::kAllGather, all.numel()),
                           elements_of(all), bounds);
  }
  call_broadcast(*inside_.backend, all, /*root=*/0);
  const Elements from = elements_of(all), to = elements_of(bytes_of(output));
  int64_t at = 0;
  for (int64_t rank : by_host()) {
    copy(from.part(at, at + piece), to.part(rank * piece, (rank + 1) * piece));
    at += piece;
  }
}

void Hierarchical::broadcast(const at::Tensor& tensor, int64_t root) {
  const HostMap::Place from = map_.place_of(root);
  const bool has_it = from.host == map_.host;
  if (has_it) call_broadcast(*inside_.backend, tensor, from.local);
  if (leaders_) {
    algorithms::broadcast(*leaders_, Algorithm::kTree,
                          elements_of(tensor).bytes(), from.host);
  }
  if (!has_it) call_broadcast(*inside_.backend, tensor, /*root=*/0);
}

void Hierarchical::barrier() {
  call_barrier(*inside_.backend);
  if (leaders_) {
    const Scratch token(1, at::kByte);
    token.elements().data[0] = std::byte{0};
    algorithms::all_reduce(*leaders_, Algorithm::kRecursiveDoubling,
                           token.elements(), token.elements(),
                           {ReduceOp::kMax, leaders_->size()});
  }
  call_barrier(*inside_.backend);
}

Connection make_hierarchical(Hierarchy hierarchy, Chooser choose) {
  const int rank = hierarchy.across.backend->getRank();
  const int size = hierarchy.across.backend->getSize();
  auto empty = hierarchy.inside.empty;
  Connection whole = make_queued(
      rank, size,
      std::make_unique<Hierarchical>(std::move(hierarchy), std::move(choose)));
  whole.empty = std::move(empty);
  return whole;
}

}  // namespace tessera::comm::algorithms
