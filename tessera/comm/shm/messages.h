// Messages between two ranks: sends and receives with tags.
//
// Small ones go through the channels of a Segment. Of a large one the envelope
// alone does: the receiver copies it from where it lies (peer_memory.h), tells
// the sender so, and only then is it sent. One that nobody asks for is copied
// aside when it has waited for as long as that takes: so sends that cross never
// block each other, whatever their size.
// Whoever submits or waits brings everything on as far as it goes; while nobody
// does, but something is pending, a thread of its own, which a peer's bell
// wakes. So what hears of a completion (a future's callback) may run on any of
// these, and a large message is sent only once its receiver has something
// pending too.
//
// Order:  messages of one pair and tag are received in the order sent.
// Errors: on the Work: c10::DistBackendError when a peer died or left or time
//         is up, TS_CHECK when a message has another size or dtype than its
//         receive. All that is pending fails with it.
// Threads: any.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/comm/detail/worker.h"
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

class Messages : public Driver {
 public:
  // Messages of more than `lend_bytes` are not sent through a channel, where
  // the receiver can reach them: those that would not fit into one.
  static constexpr int64_t kLendBytes = kChannelBytes - 256;
  static constexpr int64_t kNeverLend = INT64_MAX;
  Messages(Segment& segment,
           std::function<void(const std::string& why)> on_failure,
           int64_t lend_bytes = kLendBytes);
  // REQUIRES: closed.
  ~Messages() override = default;
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void submit(Transfer transfer);
  void run_until_done(PendingWork& work) override;
  // Waits for what is pending, and leaves the segment alone from then on.
  void close();

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
    Clock::time_point moved_at;
    bool has_to_send() const { return !taken.empty() || !sends.empty(); }
    bool pending() const;
  };

  void loop();
  template <typename Done>
  void advance_until(const Done& done);
  // Brings all on as far as it goes; while another thread is at it, that one
  // does so once more. `looks`: also whether waiting is of use.
  void advance(bool looks = false);
  // How long to sleep at most.
  std::chrono::nanoseconds slice() const;

  bool tell_done();

  // Of whoever has `busy_`.
  void step();
  bool update_pending();
  // A peer that rings shall wake the thread, while nobody else is there.
  // Starts it.
  void count_thread();
  void take_submitted();
  bool pending() const;
  bool progress();
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
  void check_peers();
  void check_any(Clock::time_point now);
  // Told when it is not busy any more.
  void complete(Transfer& transfer, const std::exception_ptr& error);
  void fail_all(const std::exception_ptr& error);

  Segment& segment_;
  const int64_t rank_;
  const int64_t lend_bytes_;
  Waiter waiter_;
  std::function<void(const std::string&)> on_failure_;

  std::mutex mutex_;
  std::vector<Transfer> submitted_;
  std::deque<std::pair<Transfer, std::exception_ptr>> done_;

  std::atomic<bool> busy_ = false;   // somebody brings it on,
  std::atomic<bool> again_ = false;  // and shall once more,
  std::atomic<bool> looks_ = false;  // and look at the peers
  std::atomic<int> waiters_ = 0;
  std::atomic<int> visitors_ = 0;  // those, and who are about to leave
  std::atomic<bool> pending_ = false;
  std::atomic<bool> closed_ = false;
  static constexpr int64_t kNever = std::chrono::nanoseconds::max().count();
  std::atomic<int64_t> aside_at_ns_ = kNever;  // the first Arrival::aside_at

  // Of whoever has `busy_`.
  PeerMemory memory_;
  std::vector<Peer> peers_;
  std::deque<Transfer> from_any_;
  Clock::time_point any_since_;
  Clock::time_point looked_at_;
  bool thread_counts_ = false;
  // When it failed, peers may have been copying them.
  std::vector<at::Tensor> lent_for_good_;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace tessera::comm::shm
