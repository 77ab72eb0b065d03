// Completes Gloo's sends and receives, which end for whoever waits alone.
//
// Who waits for a message does so on its own thread. Those that nobody waits
// for soon are awaited by a thread of the group, one after the other in the
// order of the calls: it starts with the first message.
// Errors: where one fails, all others of the group do that are not done. Gloo
//         never ends a message of which a part had been moved when its line
//         closed: another thread looks for those once a second.
// Threads: any. Whoever waits for a work keeps its queue, also after close().
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/base/worker.h"

namespace tessera::comm::gloo {

class MessageQueue : public Driver {
 public:
  MessageQueue() = default;
  // REQUIRES: closed.
  ~MessageQueue() override = default;
  MessageQueue(const MessageQueue&) = delete;
  MessageQueue& operator=(const MessageQueue&) = delete;

  // `work` ends as `message`, which nobody else waits for. `line`: a receive
  // from the same peer that never ends, and fails when its line closes.
  void submit(c10::intrusive_ptr<c10d::Work> message,
              c10::intrusive_ptr<PendingWork> work,
              c10::intrusive_ptr<c10d::Work> line);
  void run_until_done(PendingWork& work) override;
  // Waits for what was submitted: for the time-out, where a peer is silent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Message {
    c10::intrusive_ptr<c10d::Work> message, line;
    c10::intrusive_ptr<PendingWork> work;
    Clock::time_point since;
  };
  void loop();
  void watch_lines();
  // Unlocks meanwhile.
  void await(std::unique_lock<std::mutex>& lock,
             const std::deque<Message>::iterator& waiting);

  std::mutex mutex_;
  std::condition_variable called_;  // for the thread
  std::condition_variable ended_;   // some message
  std::condition_variable closed_;  // for the one that looks at lines
  std::deque<Message> waiting_;     // that nobody awaits yet
  struct Awaited {
    c10::intrusive_ptr<c10d::Work> message, line;
    std::exception_ptr closed = {};  // the line
  };
  std::vector<Awaited> awaited_;
  int num_told_ = 0;            // whose end is being told
  std::exception_ptr failure_;  // of the first that failed
  bool asleep_ = false;
  bool closing_ = false;
  bool is_closed_ = false;
  std::thread thread_, watches_;
};

}  // namespace tessera::comm::gloo
