// Collectives::all_to_all: parts of any size between each two ranks.
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <numeric>

#include "tessera/comm/shm/collectives.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {

// In bytes. `total[r]`: of rank r's input; `mine[r]`: where this rank's part of
// it begins; `to[r]`: where the part of r begins in this rank's output.
struct Collectives::Moves {
  c10::SmallVector<int64_t, 8> total = {}, mine = {}, to = {};
  std::span<const int64_t> received;
};

// This rank's input, and what of it stays here: in bytes.
struct Collectives::Kept {
  Kept(const char* data, std::span<const int64_t> in_bytes, int64_t rank);
  const char* input;
  int64_t begin = 0, end = 0, total = 0;
};

// One meeting does for the splits, for what is shared, and for the first round.
void Collectives::all_to_all(std::span<const int64_t> out_bytes, void* output,
                             std::span<const int64_t> in_bytes,
                             const void* input, at::ScalarType dtype) {
  const Meeting::Scope scope(meeting_,
                             {.verb = Verb::kAllToAll, .dtype = dtype});
  char* to = static_cast<char*>(output);
  const Kept kept(static_cast<const char*>(input), in_bytes, rank_);
  const Share own = share_of(input, kept.total, Use::kMove);
  const bool stages = own.kind == Share::Kind::kNowhere;
  publish(own, kept.total);
  publish_splits(out_bytes, in_bytes);
  if (stages) stage_round(kept, 0);
  meet_and_look(kept.total);
  check_splits();
  const Moves moves = moves_of(out_bytes);
  int64_t longest = 0;  // of what is staged
  for (int64_t r = 0; r < size_; ++r) {
    read_share(r, moves.total[r]);
    if (is_staged(r)) longest = std::max(longest, moves.total[r]);
  }
  for (int64_t done = 0; done < longest; done += kStageBytes) {
    if (done > 0) {
      if (stages) stage_round(kept, done);
      meeting_.meet();
    }
    take_round(moves, done, to);
    half_ ^= 1;
  }
  const bool any_in_place = take_in_place(moves, to);
  copy_bytes(to + moves.to[rank_], kept.input + kept.begin,
             kept.end - kept.begin);
  if (any_in_place) meeting_.meet();
}

Collectives::Kept::Kept(const char* data, std::span<const int64_t> in_bytes,
                        int64_t rank)
    : input(data) {
  const auto before = in_bytes.first(static_cast<size_t>(rank));
  begin = std::reduce(before.begin(), before.end());
  end = begin + in_bytes[rank];
  total = std::reduce(in_bytes.begin(), in_bytes.end());
}

// The round that begins at `done`, without what stays here.
void Collectives::stage_round(const Kept& kept, int64_t done) {
  const int64_t round_end = std::min(done + kStageBytes, kept.total);
  const auto stage = [&](int64_t first, int64_t last) {
    if (first >= last) return;
    copy_bytes(own_stage() + (first - done), kept.input + first, last - first,
               stores_for(kept.total));
  };
  stage(done, std::min(round_end, kept.begin));
  stage(std::max(done, kept.end), round_end);
}

// Out of the round of every staged input that begins at `done`.
void Collectives::take_round(const Moves& moves, int64_t done, char* output) {
  for (int64_t k = 1; k < size_; ++k) {
    const int64_t p = peer(k);
    const int64_t first = std::max(done, moves.mine[p]);
    const int64_t last =
        std::min(done + kStageBytes, moves.mine[p] + moves.received[p]);
    if (!is_staged(p) || first >= last) continue;
    copy_bytes(output + moves.to[p] + (first - moves.mine[p]),
               stage_of(p) + (first - done), last - first);
  }
}

// Whether there was anything that is not staged.
bool Collectives::take_in_place(const Moves& moves, char* output) {
  bool any = !is_staged(rank_);
  for (int64_t k = 1; k < size_; ++k) {
    const int64_t p = peer(k);
    if (is_staged(p)) continue;
    any = true;
    memory_.copy_from(p, shares_[p], output + moves.to[p], moves.mine[p],
                      moves.received[p]);
  }
  return any;
}

Collectives::Moves Collectives::moves_of(
    std::span<const int64_t> out_bytes) const {
  Moves moves{.received = out_bytes};
  for (auto* numbers : {&moves.total, &moves.mine, &moves.to}) {
    numbers->assign(static_cast<size_t>(size_), 0);
  }
  for (int64_t r = 0; r < size_; ++r) {
    for (int64_t q = 0; q < size_; ++q) {
      if (q == rank_) moves.mine[r] = moves.total[r];
      moves.total[r] += split(r, q);
    }
  }
  std::exclusive_scan(out_bytes.begin(), out_bytes.end(), moves.to.begin(),
                      int64_t{0});
  return moves;
}

void Collectives::publish_splits(std::span<const int64_t> out_bytes,
                                 std::span<const int64_t> in_bytes) {
  splits_parity_ ^= 1;
  std::atomic<int64_t>* own = segment_.splits(rank_, splits_parity_);
  for (int64_t r = 0; r < size_; ++r) {
    own[r].store(in_bytes[r], std::memory_order_relaxed);
    own[size_ + r].store(out_bytes[r], std::memory_order_relaxed);
  }
}

// All ranks see the whole matrix, so that all fail alike where it disagrees.
void Collectives::check_splits() const {
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
