// What a rank calls on one communicator of a device's library, and the watch
// over all of them.
//
// A lane opens when it is first called, on a thread of its own: no call waits
// for a peer, so that ranks may come to their lanes in any order. Until then
// calls are kept, in their order; from then on they are made at once. Those of
// a lane end in the order of the calls.
// Host:    waits, in a Work's wait(), until the call is on the device's stream.
// Watch:   one thread a rank looks every kLook at what devices have ended. An
//          operation that does not end within the time-out from where the
//          device came to it fails; then all lanes of the rank are aborted, so
//          that nothing waits for ever, the host in a device's stream neither.
// Errors:  of a call that the library refuses, at the call, or where it was
//          kept on its Work.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/base/backend_work.h"

namespace tessera::comm::nccl {

// An operation that was put on a device's stream. Throws what the library says
// has failed.
class OnDevice {
 public:
  virtual ~OnDevice() = default;
  virtual bool has_begun() = 0;
  virtual bool has_ended() = 0;
  // The current stream goes on behind it; lets go of its tensors.
  virtual void order_stream() = 0;
  virtual double seconds() = 0;  // REQUIRES: has_ended()
};

// A communicator of the library.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual void open() = 0;   // until all its ranks are here; throws in time
  virtual void close() = 0;  // until all that was called is done
  // What runs on the device ends; from any thread. REQUIRES: open() returned.
  virtual void abort() = 0;
};

class LaneWork final : public c10d::Work, public TimedWork {
 public:
  LaneWork(int rank, c10d::OpType type);

  // Throws what it failed with; else see Host.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  double seconds() const override { return seconds_; }

  void put(std::shared_ptr<OnDevice> there);
  // Whether it has ended, which completes it. Throws TimedOut, or what failed.
  bool look(std::chrono::milliseconds timeout);
  // The first call counts. Callbacks of the future have ended when who waits
  // wakes.
  void complete(const std::exception_ptr& error);

 private:
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<OnDevice> there_;
  bool has_begun_ = false;
  Clock::time_point since_ = Clock::now();  // it was called, or has begun
  double seconds_ = 0;
  bool settled_ = false, is_failing_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Watch;

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  using Call = std::function<std::shared_ptr<OnDevice>()>;

  Lane(at::Device device, std::shared_ptr<Channel> channel, Watch& watch);

  // REQUIRES: one thread at a time.
  void submit(const c10::intrusive_ptr<LaneWork>& work, const Call& call);
  // Until all is done, but for what fails. REQUIRES: no more calls.
  void close(std::chrono::milliseconds timeout);

 private:
  friend class Watch;
  struct Kept {
    c10::intrusive_ptr<LaneWork> work;
    Call call;
    std::optional<c10::Event> ready;  // where the rank's stream was
  };
  void open();
  void make_kept_calls();
  c10::intrusive_ptr<LaneWork> first();
  bool is_idle() const;
  // What the first one failed with, which stays; nullptr: none has.
  std::exception_ptr look(std::chrono::milliseconds timeout);
  void give_up(const std::exception_ptr& why);

  const at::Device device_;
  const std::shared_ptr<Channel> channel_;
  Watch& watch_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  enum class State { kNew, kOpening, kOpen, kGivenUp } state_ = State::kNew;
  bool has_channel_ = false;  // it is open, whatever came of the lane
  std::exception_ptr open_error_;
  std::exception_ptr why_;  // it was given up
  std::deque<Kept> kept_;
  std::deque<c10::intrusive_ptr<LaneWork>> pending_;
};

class Watch {
 public:
  explicit Watch(std::chrono::milliseconds timeout);
  ~Watch();  // REQUIRES: its lanes are closed
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  std::shared_ptr<Lane> make_lane(at::Device device,
                                  std::shared_ptr<Channel> channel);
  // Something was called on a lane.
  void wake();
  // Gives all lanes up.
  void fail(const std::string& why);

 private:
  void loop();
  // False: nothing is under way.
  bool look();
  std::vector<std::shared_ptr<Lane>> lanes();
  void give_up(const std::exception_ptr& why);

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Lane>> lanes_;
  bool called_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::nccl
