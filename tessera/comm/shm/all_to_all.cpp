// Collectives::all_to_all: parts of any size between each two ranks.
#include <algorithm>
#include <numeric>

#include "tessera/comm/shm/collectives.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {

// In bytes. `total[r]`: of rank r's input; `mine[r]`: where this rank's part of
// it begins; `from[r]`, `to[r]`: where this rank's part to r begins in its
// input, and that of r in its output.
struct Collectives::Moves {
  std::vector<int64_t> total, mine, from, to, received;
};

void Collectives::all_to_all(std::span<const int64_t> out_bytes, void* output,
                             std::span<const int64_t> in_bytes,
                             const void* input, at::ScalarType dtype) {
  const Meeting::Scope scope(meeting_,
                             {.verb = Verb::kAllToAll, .dtype = dtype});
  exchange_splits(out_bytes, in_bytes);
  const std::vector<int64_t> none(static_cast<size_t>(size_), 0);
  Moves moves{.total = none,
              .mine = none,
              .from = none,
              .to = none,
              .received = {out_bytes.begin(), out_bytes.end()}};
  for (int64_t r = 0; r < size_; ++r) {
    for (int64_t q = 0; q < size_; ++q) {
      if (q == rank_) moves.mine[r] = moves.total[r];
      moves.total[r] += split(r, q);
    }
  }
  std::exclusive_scan(in_bytes.begin(), in_bytes.end(), moves.from.begin(),
                      int64_t{0});
  std::exclusive_scan(out_bytes.begin(), out_bytes.end(), moves.to.begin(),
                      int64_t{0});
  char* to = static_cast<char*>(output);
  const char* from = static_cast<const char*>(input);
  copy_bytes(to + moves.to[rank_], from + moves.from[rank_], out_bytes[rank_]);
  all_to_all_staged(moves, to, from);
}

void Collectives::all_to_all_staged(const Moves& moves, char* output,
                                    const char* input) {
  const int64_t longest =
      *std::max_element(moves.total.begin(), moves.total.end());
  if (longest == 0) return;
  // What this rank sends to itself is left out.
  const int64_t kept = moves.mine[rank_];
  const int64_t kept_end = kept + moves.received[rank_];
  const auto stage = [&](int64_t done) {
    const int64_t end = std::min(done + kStageBytes, moves.total[rank_]);
    const int64_t after = std::max(done, kept_end);
    copy_bytes(own_stage(), input + done, std::min(end, kept) - done,
               stores_for(longest));
    copy_bytes(own_stage() + (after - done), input + after, end - after,
               stores_for(longest));
  };
  if (meet_in_place(input, longest, Use::kMove, [&] { stage(0); })) {
    return all_to_all_in_place(moves, output);
  }
  for (int64_t done = 0; done < longest; done += kStageBytes) {
    if (done > 0) {
      stage(done);
      meeting_.meet();
    }
    for (int64_t k = 1; k < size_; ++k) {
      const int64_t p = peer(k);
      const int64_t first = std::max(done, moves.mine[p]);
      const int64_t last =
          std::min(done + kStageBytes, moves.mine[p] + moves.received[p]);
      copy_bytes(output + moves.to[p] + (first - moves.mine[p]),
                 stage_of(p) + (first - done), last - first);
    }
    half_ ^= 1;
  }
}

void Collectives::all_to_all_in_place(const Moves& moves, char* output) {
  for (int64_t k = 1; k < size_; ++k) {
    const int64_t p = peer(k);
    copy_from(p, output + moves.to[p], moves.mine[p], moves.received[p]);
  }
  meeting_.meet();
}

// All ranks see the whole matrix, so that all fail alike where it disagrees.
void Collectives::exchange_splits(std::span<const int64_t> out_bytes,
                                  std::span<const int64_t> in_bytes) {
  splits_parity_ ^= 1;
  std::atomic<int64_t>* own = segment_.splits(rank_, splits_parity_);
  for (int64_t r = 0; r < size_; ++r) {
    own[r].store(in_bytes[r], std::memory_order_relaxed);
    own[size_ + r].store(out_bytes[r], std::memory_order_relaxed);
  }
  meeting_.meet();
  const auto& ranks = segment_.place().ranks;
  for (int64_t from = 0; from < size_; ++from) {
    for (int64_t to = 0; to < size_; ++to) {
      const int64_t sent = split(from, to);
      const int64_t expected = split(to, size_ + from);
      if (sent == expected) continue;
      TS_CHECK(false, "ranks disagree: rank ", ranks[from], " sends ", sent,
               " bytes to rank ", ranks[to], ", which expects ", expected);
    }
  }
}

int64_t Collectives::split(int64_t rank, int64_t index) const {
  return segment_.splits(rank, splits_parity_)[index].load(
      std::memory_order_relaxed);
}

}  // namespace tessera::comm::shm
