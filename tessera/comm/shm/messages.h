// Messages between the ranks of a group: who brings a Mailbox on.
//
// Whoever submits or waits does, as far as it goes; while nobody does, but
// something is pending, a thread of its own, which a peer's bell wakes. So what
// hears of a completion (a future's callback) may run on any of these, and a
// large message is sent only once its receiver has something pending too.
//
// Errors:  those of the Mailbox, on the Work. All that is pending fails with
//          the first, and all that is submitted later.
// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/comm/base/worker.h"
#include "tessera/comm/shm/mailbox.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

class Messages : public Driver {
 public:
  Messages(Segment& segment,
           std::function<void(const std::string& why)> on_failure,
           int64_t lend_bytes = Mailbox::kLendBytes);
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

  void loop();
  template <typename Done>
  void advance_until(const Done& done);
  // Brings all on as far as it goes; while another thread is at it, that one
  // does so once more. `looks`: also whether waiting is of use.
  void advance(bool looks = false);
  bool tell_done();

  // Of whoever has `busy_`.
  void step();
  bool update_pending();
  // A peer that rings shall wake the thread, while nobody else is there.
  // Starts it.
  void count_thread();
  void take_submitted();
  void fail(const std::exception_ptr& error);

  Word& bell_;  // what peers ring
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

  // Of whoever has `busy_`.
  Mailbox mailbox_;
  Clock::time_point looked_at_;
  bool thread_counts_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::shm
