// all_to_all over several hosts, straight and aggregated: see hierarchical.h.
#include <numeric>

#include "tessera/comm/algorithms/hierarchical_collectives.h"

namespace tessera::comm::algorithms {
namespace {

enum class Way : uint8_t { kInside, kStraight, kAggregated };

// Where each rank's bytes begin.
Bounds begins_of(const std::vector<int64_t>& splits) {
  Bounds bounds{0};
  for (int64_t bytes : splits) bounds.push_back(bounds.back() + bytes);
  return bounds;
}

// Pieces of memory, taken one after the other.
class Pieces {
 public:
  explicit Pieces(const Elements& whole) : rest_(whole) {}
  Elements next(int64_t numel) {
    const Elements piece = rest_.part(0, numel);
    rest_ = rest_.part(numel, rest_.numel);
    return piece;
  }

 private:
  Elements rest_;
};

int64_t bytes_in(const std::vector<Elements>& parts) {
  return std::accumulate(
      parts.begin(), parts.end(), int64_t{0},
      [](int64_t sum, const Elements& part) { return sum + part.numel; });
}

bool are_consecutive(const std::vector<int64_t>& ascending) {
  return ascending.back() - ascending.front() + 1 ==
         static_cast<int64_t>(ascending.size());
}

}  // namespace

// One call, in bytes.
struct Hierarchical::Moves {
  Elements in, out;
  Bounds in_begins, out_begins;
  std::vector<Way> way_to, way_from;  // by rank
  // By place on this host: the ranks there on other hosts whose bytes it takes.
  std::vector<std::vector<int64_t>> taken;
  at::Tensor of_host;  // (locals, ranks): what each rank here sends to each

  Elements for_rank(int64_t rank) const {
    return pieces_of(in, in_begins, rank, rank + 1);
  }
  Elements from_rank(int64_t rank) const { return from_ranks(rank, rank); }
  Elements from_ranks(int64_t first, int64_t last) const {
    return pieces_of(out, out_begins, first, last + 1);
  }
  int64_t sent_by(int64_t local, int64_t rank) const {
    return of_host.const_data_ptr<int64_t>()[local * of_host.size(1) + rank];
  }
  int64_t sent_by_all(int64_t rank) const {
    int64_t bytes = 0;
    for (int64_t local = 0; local < of_host.size(0); ++local) {
      bytes += sent_by(local, rank);
    }
    return bytes;
  }
};

// What the ranks of this host gave this one for its place on each other.
struct Hierarchical::HandedOver {
  at::Tensor memory;
  std::vector<std::vector<Elements>> parts;  // by host: of each rank here
};

void Hierarchical::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              std::vector<int64_t> output_splits,
                              std::vector<int64_t> input_splits) {
  const int64_t size = everyone_.size();
  Moves moves{.in = elements_of(bytes_of(input)),
              .out = elements_of(bytes_of(output)),
              .in_begins = begins_of(input_splits),
              .out_begins = begins_of(output_splits),
              .way_to = std::vector(size, Way::kStraight),
              .way_from = std::vector(size, Way::kStraight),
              .taken = std::vector<std::vector<int64_t>>(map_.num_locals()),
              .of_host = {}};
  for (int64_t rank : map_.locals()) {
    moves.way_to[rank] = moves.way_from[rank] = Way::kInside;
  }
  const bool may_aggregate = map_.is_even() && map_.num_locals() > 1;
  if (may_aggregate) choose_ways(moves, input_splits);
  const HandedOver handed = move_inside(moves);
  if (may_aggregate) move_between(moves, handed);
  move_straight(moves);
}

// The choice for a rank is by what a host has for it in all: the rank knows it
// from its own splits, the host's ranks from each other's.
void Hierarchical::choose_ways(Moves& moves,
                               const std::vector<int64_t>& input_splits) {
  const auto is_aggregated = [&](int64_t bytes) {
    return choose(Verb::kAllToAll, bytes) == Algorithm::kAggregated;
  };
  const at::Tensor own = empty_of(everyone_.size(), at::kLong);
  std::copy(input_splits.begin(), input_splits.end(),
            own.mutable_data_ptr<int64_t>());
  moves.of_host = at::empty({map_.num_locals(), everyone_.size()}, at::kLong);
  call_all_gather(*inside_.backend, moves.of_host, own);
  for (int64_t host = 0; host < map_.num_hosts(); ++host) {
    if (host == map_.host) continue;
    const std::vector<int64_t>& ranks = map_.members[host];
    int64_t from_host = 0;
    for (int64_t place = 0; place < map_.num_locals(); ++place) {
      const int64_t rank = ranks[place];
      from_host += moves.from_rank(rank).numel;
      if (!is_aggregated(moves.sent_by_all(rank))) continue;
      moves.way_to[rank] = Way::kAggregated;
      moves.taken[place].push_back(rank);
    }
    if (!is_aggregated(from_host)) continue;
    for (int64_t rank : ranks) moves.way_from[rank] = Way::kAggregated;
  }
}

// What this rank gives each rank here, in its order: what is for that one, and
// what that one takes to its place on other hosts.
at::Tensor Hierarchical::packed_inside(const Moves& moves,
                                       std::vector<int64_t>& splits) const {
  for (int64_t local = 0; local < map_.num_locals(); ++local) {
    splits.push_back(moves.for_rank(map_.locals()[local]).numel);
    for (int64_t peer : moves.taken[local]) {
      splits.back() += moves.for_rank(peer).numel;
    }
  }
  at::Tensor packed = empty_of(begins_of(splits).back(), at::kByte);
  Pieces pieces(elements_of(packed));
  const auto pack = [&](const Elements& piece) {
    copy(piece, pieces.next(piece.numel));
  };
  for (int64_t local = 0; local < map_.num_locals(); ++local) {
    pack(moves.for_rank(map_.locals()[local]));
    for (int64_t peer : moves.taken[local]) pack(moves.for_rank(peer));
  }
  return packed;
}

Hierarchical::HandedOver Hierarchical::move_inside(const Moves& moves) {
  std::vector<int64_t> gives, gets;
  const at::Tensor given = packed_inside(moves, gives);
  const std::vector<int64_t>& taken_here = moves.taken[map_.local];
  for (int64_t local = 0; local < map_.num_locals(); ++local) {
    gets.push_back(moves.from_rank(map_.locals()[local]).numel);
    for (int64_t peer : taken_here) gets.back() += moves.sent_by(local, peer);
  }
  HandedOver handed{
      .memory = empty_of(begins_of(gets).back(), at::kByte),
      .parts = std::vector<std::vector<Elements>>(map_.num_hosts())};
  call_all_to_all(*inside_.backend, handed.memory, given, gets, gives);
  Pieces incoming(elements_of(handed.memory));
  for (int64_t local = 0; local < map_.num_locals(); ++local) {
    const Elements own = moves.from_rank(map_.locals()[local]);
    copy(incoming.next(own.numel), own);
    for (int64_t peer : taken_here) {
      handed.parts[map_.place_of(peer).host].push_back(
          incoming.next(moves.sent_by(local, peer)));
    }
  }
  return handed;
}

// What was handed over, in one message to the rank at this place on each other
// host, which has those of all ranks here in their order.
void Hierarchical::move_between(const Moves& moves, const HandedOver& handed) {
  const int64_t hosts = map_.num_hosts();
  for (int64_t step = 1; step < hosts; ++step) {
    const int64_t next = (map_.host + step) % hosts;
    const int64_t before = (map_.host + hosts - step) % hosts;
    const std::vector<Elements>& parts = handed.parts[next];
    const Scratch sent(bytes_in(parts), at::kByte);
    Pieces outgoing(sent.elements());
    for (const Elements& part : parts) copy(part, outgoing.next(part.numel));

    std::vector<Elements> rows;
    const std::vector<int64_t>& ranks = map_.members[before];
    if (moves.way_from[ranks.front()] == Way::kAggregated) {
      for (int64_t rank : ranks) rows.push_back(moves.from_rank(rank));
    }
    const bool in_place = !rows.empty() && are_consecutive(ranks);
    const Scratch received(in_place ? 0 : bytes_in(rows), at::kByte);
    exchange(*bridge_, sent.elements().bytes(), next,
             (in_place ? moves.from_ranks(ranks.front(), ranks.back())
                       : received.elements())
                 .bytes(),
             before);
    if (in_place) continue;
    Pieces incoming(received.elements());
    for (const Elements& row : rows) copy(incoming.next(row.numel), row);
  }
}

// In step s every rank sends to the one s places on: no link is asked twice.
void Hierarchical::move_straight(const Moves& moves) {
  const int64_t size = everyone_.size(), rank = everyone_.rank();
  for (int64_t step = 1; step < size; ++step) {
    const int64_t next = (rank + step) % size;
    const int64_t before = (rank + size - step) % size;
    const auto if_straight = [](Way way, const Elements& piece) {
      return way == Way::kStraight ? piece.bytes() : std::span<std::byte>();
    };
    exchange(everyone_, if_straight(moves.way_to[next], moves.for_rank(next)),
             next, if_straight(moves.way_from[before], moves.from_rank(before)),
             before);
  }
}

}  // namespace tessera::comm::algorithms
