#include "tessera/comm/link.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace tessera::comm {
namespace {

constexpr int kTrips = 5, kLoads = 3;
// Apart from the messages of pipelines, which count from 0.
constexpr int64_t kTag = 9001;

// There and back; the lower rank begins. Microseconds, as it sees them, of the
// quickest.
double trip_us(Group& group, int64_t peer, const at::Tensor& there,
               const at::Tensor& back, int times) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    if (group.rank() < peer) {
      group.send(there, peer, kTag).synchronize();
      group.recv(back, peer, kTag).synchronize();
    } else {
      group.recv(there, peer, kTag).synchronize();
      group.send(back, peer, kTag).synchronize();
    }
    const std::chrono::duration<double, std::micro> took =
        std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

}  // namespace

int64_t rounds_of_links(int64_t size) {
  return size % 2 == 0 ? size - 1 : size;
}

std::optional<int64_t> link_peer(int64_t rank, int64_t size, int64_t round) {
  const int64_t circle = rounds_of_links(size);
  round %= circle;
  // On the circle i and j meet where i + j = round; who would meet itself
  // meets the one in the middle, if the size is even.
  if (rank == circle) {
    return round % 2 == 0 ? round / 2 : (round + circle) / 2;
  }
  const int64_t peer = (round - rank + circle) % circle;
  if (peer != rank) return peer;
  if (size % 2 == 0) return circle;
  return std::nullopt;
}

std::optional<LinkSpeed> measure_link(Group& group, int64_t round) {
  const auto peer = link_peer(group.rank(), group.size(), round);
  if (!peer) return std::nullopt;
  const at::Tensor note = at::zeros({1}, at::kInt);
  const at::Tensor bulk = at::zeros({kLinkBytes}, at::kByte);
  const double trip = trip_us(group, *peer, note, note, kTrips);
  const double loaded = trip_us(group, *peer, bulk, note, kLoads);
  if (group.rank() > *peer) return std::nullopt;
  const double us = std::max(loaded - trip / 2, 1e-3);
  return LinkSpeed{.latency_us = trip / 2,
                   .bytes_per_s = kLinkBytes / us * 1e6};
}

}  // namespace tessera::comm
