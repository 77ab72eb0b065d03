// Messages between two ranks: sends and receives with tags, over the channels
// of a Segment.
//
// A thread of its own moves bytes while this rank has an operation pending: its
// sends into their channels, and out of every channel what peers sent: into the
// tensor of the receive that asked for it, or aside until one asks. So sends
// that cross never block each other, whatever their size.
// Order:  messages of one pair and tag are received in the order sent.
// Errors: on the Work: c10::DistBackendError when a peer died or left or time
//         is up, TS_CHECK when a message has another size or dtype than its
//         receive. All that is pending fails with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/detail/worker.h"
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

class Messages {
 public:
  Messages(Segment& segment,
           std::function<void(const std::string& why)> on_failure);
  // Waits for what is pending.
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void submit(Transfer transfer);

 private:
  // What precedes a message in its channel.
  struct Envelope {
    int64_t tag = 0;
    int64_t numel = 0;
    int64_t dtype = 0;
    int64_t bytes = 0;
  };
  // A message on its way in, or there and not asked for.
  struct Arrival {
    Envelope envelope;
    std::optional<Transfer> receive;  // that asked for it
    std::vector<char> aside;          // the bytes, until one asks
    int64_t moved = 0;
    bool complete() const { return moved == envelope.bytes; }
  };
  // What this rank and one peer have pending.
  struct Peer {
    std::deque<Transfer> sends;  // the first is moving
    bool envelope_sent = false;
    int64_t sent = 0;  // bytes of the first
    std::deque<Transfer> receives;
    std::list<Arrival> arrivals;  // in the order sent; the last may be moving
    std::chrono::steady_clock::time_point moved_at;
    bool pending() const;
  };

  void loop();
  void run_pending();
  void take_submitted();
  bool pending() const;
  bool progress();
  bool push(int64_t peer);
  bool pull(int64_t peer);
  void begin_arrival(int64_t from, const Envelope& envelope);
  void claim_arrivals();
  bool claim(int64_t from, Arrival& arrival);
  // The first of them with this tag.
  static std::optional<Transfer> take_receive(std::deque<Transfer>& receives,
                                              int64_t tag);
  void deliver(Peer& from, std::list<Arrival>::iterator arrival);
  void check_fits(const Transfer& receive, const Envelope& envelope) const;
  void check_peers();
  void check_any(std::chrono::steady_clock::time_point now);
  void fail_all(const std::exception_ptr& error);

  Segment& segment_;
  const int64_t rank_;
  Waiter waiter_;
  std::chrono::steady_clock::time_point checked_at_;  // the peers
  std::function<void(const std::string&)> on_failure_;
  // Of the thread alone.
  std::vector<Peer> peers_;
  std::deque<Transfer> from_any_;
  std::chrono::steady_clock::time_point any_since_;
  std::exception_ptr failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Transfer> submitted_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::shm
