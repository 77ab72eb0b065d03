// What one rank sends to and receives from the others of its group, and how it
// moves: sends and receives with tags.
//
// Small messages go through the channels of a Segment. Of a large one the
// envelope alone does: the receiver copies it from where it lies
// (peer_memory.h), tells the sender so, and only then is it sent. One that
// nobody asks for is copied aside when it has waited for as long as that takes:
// so sends that cross never block each other, whatever their size.
//
// Order:   messages of one pair and tag are received in the order sent.
// Errors:  c10::DistBackendError when a peer died or left, TimedOut, TS_CHECK
//          when a message has another size or dtype than its receive. Then
//          fail() is due: what the channels hold is no message any more.
// Threads: one at a time, but for patience().
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/base/worker.h"
#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/peer_memory.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

// A send or a receive; a receive from kAnyPeer takes the first message of its
// tag that is there, of whichever rank.
inline constexpr int64_t kAnyPeer = -1;
struct Transfer {
  c10::intrusive_ptr<PendingWork> work;
  at::Tensor tensor;
  bool sends = false;
  int64_t peer = 0;
  int64_t tag = 0;
};

class Mailbox {
 public:
  // Messages of more than `lend_bytes` are not sent through a channel, where
  // the receiver can reach them: those that would not fit into one.
  static constexpr int64_t kLendBytes = kChannelBytes - 256;
  static constexpr int64_t kNeverLend = INT64_MAX;
  // Null: done. Else why it failed.
  using OnDone =
      std::function<void(Transfer transfer, const std::exception_ptr& error)>;
  Mailbox(Segment& segment, OnDone on_done, int64_t lend_bytes);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void take(Transfer transfer);
  // Whether anything of what was taken is not done.
  bool pending() const;
  // Moves what can be moved. False: nothing could.
  bool progress();
  // How long nobody need look, at most.
  std::chrono::nanoseconds patience() const;
  // Called while nothing moves: throws when waiting is of no use.
  void check_peers();
  // All that is pending, and all that will be taken, fails.
  void fail(const std::exception_ptr& error);
  bool has_failed() const { return failure_ != nullptr; }

 private:
  using Clock = std::chrono::steady_clock;

  // What goes through a channel. kBytes: a message's bytes follow. kLent: they
  // lie where `share` says. kTaken: message number `id` of those lent by the
  // rank that reads this has been copied.
  enum class Kind : int64_t { kBytes, kLent, kTaken };
  struct Envelope {
    Kind kind = Kind::kBytes;
    int64_t tag = 0;
    int64_t numel = 0;
    int64_t dtype = 0;
    int64_t bytes = 0;
    uint64_t id = 0;
    Share share = {};
  };
  // A message on its way in, or there and not asked for.
  struct Arrival {
    Envelope envelope;
    std::optional<Transfer> receive = {};  // that asked for it
    std::unique_ptr<char[]> aside = {};    // the bytes, until one asks
    int64_t moved = 0;
    Clock::time_point aside_at = {};  // is_lent: when it has waited enough
    bool complete() const { return moved == envelope.bytes; }
    bool is_in_channel() const {
      return envelope.kind == Kind::kBytes && !complete();
    }
    bool is_lent() const { return envelope.kind == Kind::kLent && !complete(); }
    void set_aside() {
      aside = std::make_unique_for_overwrite<char[]>(envelope.bytes);
    }
    // REQUIRES: asked for or set aside.
    char* target() const {
      return aside ? aside.get()
                   : static_cast<char*>(receive->tensor.data_ptr());
    }
  };
  // What this rank and one peer have pending.
  struct Peer {
    std::deque<uint64_t> taken;  // to be told
    std::deque<Transfer> sends;  // the first is moving
    bool envelope_sent = false;
    int64_t sent = 0;                               // bytes of the first
    std::list<std::pair<uint64_t, Transfer>> lent;  // with their ids
    uint64_t num_lent = 0;
    std::deque<Transfer> receives;
    std::list<Arrival> arrivals;  // in the order sent; the last may be moving
    Waited waited;                // since something moved
    bool has_to_send() const { return !taken.empty() || !sends.empty(); }
    bool pending() const;
  };

  bool move();
  bool push(int64_t to);
  bool push_next(int64_t to);
  bool push_bytes(Peer& peer, Channel& channel);
  Envelope envelope_of(const Transfer& send, uint64_t id) const;
  bool pull(int64_t from);
  void begin_arrival(int64_t from, const Envelope& envelope);
  bool claim_arrivals();
  bool claim(int64_t from, Arrival& arrival);
  // The first of them with this tag.
  static std::optional<Transfer> take_receive(std::deque<Transfer>& receives,
                                              int64_t tag);
  void settle(int64_t from, std::list<Arrival>::iterator arrival);
  void take_lent(int64_t from, Arrival& arrival);
  bool take_aside();
  void end_lending(Peer& to, uint64_t id);
  void deliver(Peer& from, std::list<Arrival>::iterator arrival);
  void check_fits(const Transfer& receive, const Envelope& envelope) const;
  void check_any(Clock::time_point now);

  Segment& segment_;
  const int64_t rank_;
  const int64_t lend_bytes_;
  OnDone on_done_;
  PeerMemory memory_;
  std::vector<Peer> peers_;
  std::deque<Transfer> from_any_;
  Waited waited_for_any_;
  static constexpr int64_t kNever = std::chrono::nanoseconds::max().count();
  std::atomic<int64_t> aside_at_ns_ = kNever;  // the first Arrival::aside_at
  std::exception_ptr failure_;
};

}  // namespace tessera::comm::shm
