// The collectives over a Segment.
//
// Small (up to kSmallBytes): every rank stages all, one meeting, every rank
//   reads all.
// In place: where every rank's tensor can be reached by its peers (registered
//   memory, ranks that are threads of one process; to move more than a round,
//   also by process_vm_readv), nothing is staged: one meeting before and one
//   after.
// Staged: else. A rank copies a round of its data into one of two halves in
//   turn, and what it keeps for itself is never staged. One meeting a round is
//   enough to move, two to reduce and move the result.
// all_reduce, larger: rank r reduces slice r of all, in rank order, and gives
//   it to all (reduce-scatter and all-gather).
//
// Stores: past the caches where the cores are far, for else a line that a peer
//         has read costs its round trip twice; measured as it goes (Distance),
//         by each rank for itself.
// Threads: one at a time. Errors: see meeting.h.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/comm/shm/meeting.h"
#include "tessera/comm/shm/peer_memory.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

class Collectives {
 public:
  explicit Collectives(Segment& segment);

  void all_reduce(void* data, int64_t numel, at::ScalarType dtype, ReduceOp op);
  // output: `size` pieces of `numel`; it may contain input at its own place.
  void all_gather(void* output, const void* input, int64_t numel,
                  at::ScalarType dtype);
  // input: `size` pieces of `numel`.
  void reduce_scatter(void* output, const void* input, int64_t numel,
                      at::ScalarType dtype, ReduceOp op);
  // Bytes to and from each rank; pieces lie one after the other.
  void all_to_all(std::span<const int64_t> out_bytes, void* output,
                  std::span<const int64_t> in_bytes, const void* input,
                  at::ScalarType dtype);
  void broadcast(void* data, int64_t numel, at::ScalarType dtype, int64_t root);
  void barrier();

 private:
  // Up to here, to ask how peers reach a tensor costs more than it gives.
  static constexpr int64_t kSmallBytes = 32 << 10;

  void all_reduce_small(char* data, int64_t numel, at::ScalarType dtype,
                        ReduceOp op);
  void all_reduce_in_place(char* data, int64_t numel, at::ScalarType dtype,
                           ReduceOp op);
  void all_reduce_staged(char* data, int64_t numel, at::ScalarType dtype,
                         ReduceOp op);
  struct Moves;  // what all_to_all moves between each two ranks
  struct Kept;
  void stage_round(const Kept& kept, int64_t done);
  void take_round(const Moves& moves, int64_t done, char* output);
  bool take_in_place(const Moves& moves, char* output);
  Moves moves_of(std::span<const int64_t> out_bytes) const;
  void publish_splits(std::span<const int64_t> out_bytes,
                      std::span<const int64_t> in_bytes);
  void check_splits() const;
  int64_t split(int64_t rank, int64_t index) const;

  // How peers use a tensor that lies where it can be reached.
  enum class Use { kMove, kReduce, kNone };
  // Meets, and says whether every rank's `data` can be reached where it lies;
  // then `shares_` says how, and the caller ends with a meeting of its own.
  // Else every rank has run `stage_first` before a meeting.
  bool meet_in_place(const void* data, int64_t bytes, Use use,
                     const std::function<void()>& stage_first);
  Share share_of(const void* data, int64_t bytes, Use use) const;
  // The meeting before `bytes` move, and a look how far the peers are.
  void meet_and_look(int64_t bytes);
  // Before a meeting, and after it, into `shares_`. `bytes`: of that rank's
  // tensor; no line is moved where that is small.
  void publish(const Share& own, int64_t bytes);
  void read_share(int64_t rank, int64_t bytes);
  // REQUIRES: read_share.
  bool is_staged(int64_t rank) const {
    return shares_[rank].kind == Share::Kind::kNowhere;
  }
  // REQUIRES: read_share. The address here of a rank's data.
  char* address_of(int64_t rank) {
    return memory_.address_of(rank, shares_[rank]);
  }
  Stores stores_for(int64_t bytes) const;

  char* own_stage() const;
  char* stage_of(int64_t rank) const;
  // Peers, starting after this rank, so that not all read the same one.
  int64_t peer(int64_t k) const { return (rank_ + k) % size_; }

  Segment& segment_;
  const int64_t rank_;
  const int64_t size_;
  Meeting meeting_;
  PeerMemory memory_;
  std::vector<Share> shares_;  // by rank
  int half_ = 0;
  int shares_parity_ = 0;
  int splits_parity_ = 0;
};

}  // namespace tessera::comm::shm
