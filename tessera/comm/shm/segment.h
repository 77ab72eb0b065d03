// The memory that the ranks of one group share, and who of them is alive.
//
// The first rank makes a memory file (memory_file.h) and puts its process and
// number into the store; the others open that and map it, and threads of one
// process share a mapping. Ranks may be processes of one host or threads of one
// process. The end of a process is seen
// at once (peer_watch.h), and wakes those who wait for it.
//
// Layout: header | one Lane a rank | splits | channels | stages.
// Threads: what a lane holds is written by its rank alone, but for `bell` and
//          the `sleepers` of its words.
// Errors:  the constructor throws TS_CHECK_REACH, naming the ranks that did not
//          attach within the time-out (one for all of it), and TS_CHECK where
//          the system has no memory for it.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/cores.h"
#include "tessera/comm/shm/mapping.h"
#include "tessera/comm/shm/peer_watch.h"
#include "tessera/comm/shm/registered.h"
#include "tessera/comm/shm/waiting.h"
#include "tessera/comm/verb.h"
#include "tessera/core/fd.h"

namespace tessera::comm::shm {

// Which rank of which group this is.
struct Place {
  std::string group;           // for messages
  int64_t rank = 0;            // within the group
  std::vector<int64_t> ranks;  // the global rank of each member
  int64_t ranks_on_host = 1;   // of all groups
  std::chrono::milliseconds timeout;
  int64_t size() const { return static_cast<int64_t>(ranks.size()); }
};

// What a rank says that it does: its peers compare it with what they do.
struct Call {
  uint64_t sequence = 0;  // of the collectives of this group, from 1
  Verb verb = Verb::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  at::ScalarType dtype = at::kByte;
  int64_t root = -1;
  int64_t numel = 0;  // where it must agree: not in all_to_all
  bool operator==(const Call&) const = default;
  std::string describe() const;  // "all_reduce(sum) #17 of 1024 float32"
};

// A Call in three words, readable by peers while it is replaced.
struct PackedCall {
  std::array<std::atomic<uint64_t>, 3> words;
  void store(const Call& call);
  Call load() const;
};

// Where a rank's tensor lies, and how peers can reach it there.
// kNowhere: not at all. kUnread: no need to. kForeign: by asking the system to
// copy out of another process. kAddress: in the process that all ranks share.
struct Share {
  enum class Kind : uint32_t { kNowhere, kUnread, kForeign, kAddress, kRegion };
  Kind kind = Kind::kNowhere;
  char* address = nullptr;  // kForeign, kAddress
  Location location = {};   // kRegion
};

// `arrival.value` counts the meetings that the rank came to; `calls` holds what
// it did at the last two of them, by the parity of the meeting.
struct alignas(64) Lane {
  Word arrival;
  std::array<PackedCall, 2> calls;
  // Of the last two collectives that asked where tensors lie, in turn. Written
  // before the arrival, and only after all have read the one before the last.
  alignas(64) std::array<Share, 2> shares;
  // Rung by peers when a message, or room for one, is there for this rank.
  alignas(64) Word bell;
  alignas(64) std::atomic<uint32_t> state;  // a State
  std::atomic<int32_t> pid;
  // Written while attaching: own address of the lane; what trying it showed.
  std::atomic<char*> own_address;
  std::atomic<bool> reads_peers;
  std::atomic<uint32_t> steps;     // of attaching that it has done
  cpu_set_t cores;                 // that it may run on
  std::atomic<uint64_t> begun;     // sequence number of the last collective
  std::atomic<uint64_t> finished;  // and of the last that it left
  std::atomic<int64_t> since_ns;   // CLOCK_MONOTONIC when either changed
  std::array<char, 456> why;       // of kFailed; written before the state
};

enum class State : uint32_t { kAbsent, kPresent, kClosed, kFailed };

// A rank stages what the others read in one of two halves in turn.
inline constexpr int64_t kStageBytes = 1 << 20;

class Segment {
 public:
  // Blocks until every rank of the group has attached.
  Segment(Rendezvous rendezvous, Place place);
  // Tells the peers that this rank is gone, and unmaps.
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const Place& place() const { return place_; }
  // Whether all ranks are threads of this process.
  bool is_one_process() const { return is_one_process_; }
  // Whether the system lets every rank copy out of every other one's process.
  bool can_read_peers() const { return can_read_peers_; }
  // Whether every rank has a core: it may spin while it waits, and meetings are
  // cheap.
  bool ranks_have_cores() const { return ranks_have_cores_; }
  Lane& lane(int64_t rank) const { return lanes_[rank]; }
  Lane& own_lane() const { return lanes_[place_.rank]; }
  // Begins at a line; kStageBytes long.
  char* stage(int64_t rank, int half) const;
  // 2 x size numbers of `rank`, for all_to_all number `parity` (0 or 1).
  std::atomic<int64_t>* splits(int64_t rank, int parity) const;
  Channel& channel(int64_t from, int64_t to) const;

  // Marks this rank as failed and wakes all, on every rank: what is pending
  // fails. Any thread may call it; the first reason stays.
  void fail(const std::string& why);
  // Why the group cannot go on ("rank 2 failed: ..."), if a rank said so: the
  // first of them, for others fail because it did. Mostly one load from a line
  // that seldom changes.
  std::optional<std::string> failure() const;
  // Why `rank` will not come any more ("rank 2 (pid 71) has died").
  std::optional<std::string> loss_of(int64_t rank) const;
  // Of collectives of this group: "last did barrier #15, 3.2 s ago"; "is in
  // barrier #15, for 3.2 s", or "in collective #15" where it has come to no
  // meeting of it; none: it has called none.
  std::optional<std::string> last_call_of(int64_t rank) const;

 private:
  void create(Rendezvous& rendezvous);
  void attach(Rendezvous& rendezvous);
  void lay_out();
  // This rank has done one more step of attaching: until all have, or `end`.
  void meet(Rendezvous& rendezvous, std::chrono::steady_clock::time_point end);
  std::string ranks_before(uint32_t step) const;
  void wake_all_ranks();
  void watch_peers();
  void try_reading_peers();
  void count_cores();

  Place place_;
  bool is_one_process_ = true;
  bool can_read_peers_ = false;
  bool ranks_have_cores_ = false;
  Fd file_;                           // open until all have attached
  std::shared_ptr<Mapping> mapping_;  // one for all ranks of this process
  Lane* lanes_ = nullptr;
  char* splits_ = nullptr;
  char* channels_ = nullptr;
  char* stages_ = nullptr;
  std::unique_ptr<std::atomic<bool>[]> ended_;  // by rank: its process
  std::mutex failing_;
  std::vector<std::unique_ptr<Watched>> watched_;  // ends before what it tells
};

// False, with errno, where the system refuses.
bool copy_from_process(pid_t pid, void* to, const char* from, int64_t bytes);

int64_t monotonic_ns(clockid_t clock = CLOCK_MONOTONIC);

}  // namespace tessera::comm::shm
