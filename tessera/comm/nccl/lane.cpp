#include "tessera/comm/nccl/lane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "tessera/comm/base/in_time.h"
#include "tessera/comm/base/timed_out.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm::nccl {
namespace {

constexpr auto kLook = std::chrono::milliseconds(1);
// How long a library may take to end what runs, when a rank is about to end.
constexpr auto kAbortPatience = std::chrono::seconds(10);

std::exception_ptr error_of(const std::string& why) {
  return std::make_exception_ptr(Error(ExitCode::kFailed, why));
}

}  // namespace

LaneWork::LaneWork(int rank, c10d::OpType type)
    : Work(rank, type),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

bool LaneWork::wait(std::chrono::milliseconds /*timeout*/) {
  std::shared_ptr<OnDevice> there;
  {
    std::unique_lock lock(mutex_);
    cv_.wait(lock,
             [&] { return completed_ || (there_ != nullptr && !is_failing_); });
    if (exception_) std::rethrow_exception(exception_);
    there = there_;
  }
  if (there) there->order_stream();
  return true;
}

void LaneWork::put(std::shared_ptr<OnDevice> there) {
  {
    const std::lock_guard lock(mutex_);
    there_ = std::move(there);
  }
  cv_.notify_all();
}

bool LaneWork::look(std::chrono::milliseconds timeout) {
  std::shared_ptr<OnDevice> there;
  {
    const std::lock_guard lock(mutex_);
    if (settled_) return true;
    there = there_;
  }
  if (there && there->has_ended()) {
    seconds_ = there->seconds();
    complete(nullptr);
    return true;
  }
  if (there && !has_begun_) {
    has_begun_ = there->has_begun();
    since_ = Clock::now();
    return false;
  }
  // A lane that opens has the time-out for its ranks, and one for itself.
  const auto time = has_begun_ ? timeout : 2 * timeout;
  if (Clock::now() - since_ > time) {
    throw TimedOut({__func__, __FILE__, __LINE__},
                   has_begun_ ? "timed out. This rank's device came to it and "
                                "waits for its peers"
                              : "timed out. Its communicator did not open");
  }
  return false;
}

void LaneWork::complete(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(settled_, true)) return;
    is_failing_ = error != nullptr;
  }
  try {
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    }
  } catch (const std::exception& thrown) {
    log::error("a callback of a collective's future threw: ",
               message_of(thrown));
  }
  finish(error);
}

Lane::Lane(at::Device device, std::shared_ptr<Channel> channel, Watch& watch)
    : device_(device), channel_(std::move(channel)), watch_(watch) {}

void Lane::submit(const c10::intrusive_ptr<LaneWork>& work, const Call& call) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kGivenUp) return work->complete(why_);
    if (state_ != State::kOpen) {
      Kept kept{.work = work, .call = call, .ready = std::nullopt};
      if (!device_.is_cpu()) kept.ready = record_event(device_);
      kept_.push_back(std::move(kept));
      pending_.push_back(work);
      if (std::exchange(state_, State::kOpening) == State::kNew) {
        // Left behind where the library never comes back.
        std::thread([self = shared_from_this()] { self->open(); }).detach();
      }
      return watch_.wake();
    }
  }
  work->put(call());
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(work);
    if (state_ == State::kGivenUp) work->complete(why_);
  }
  watch_.wake();
}

void Lane::open() {
  try {
    channel_->open();
    {
      const std::lock_guard lock(mutex_);
      has_channel_ = true;
      changed_.notify_all();
    }
    make_kept_calls();
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    open_error_ = std::current_exception();  // the watch sees to it
  }
}

void Lane::make_kept_calls() {
  std::optional<c10::StreamGuard> beside;
  while (true) {
    Kept next;
    {
      const std::lock_guard lock(mutex_);
      if (state_ != State::kOpening) return;
      if (kept_.empty()) {
        state_ = State::kOpen;
        return changed_.notify_all();
      }
      next = std::move(kept_.front());
      kept_.pop_front();
    }
    if (next.ready) {
      if (!beside) {
        const c10::impl::VirtualGuardImpl devices(device_.type());
        // The library takes its own of the others, of which there are few.
        beside.emplace(
            devices.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
      }
      next.ready->block(beside->current_stream());
    }
    try {
      next.work->put(next.call());
    } catch (const std::exception&) {
      next.work->complete(std::current_exception());
    }
  }
}

c10::intrusive_ptr<LaneWork> Lane::first() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() ? nullptr : pending_.front();
}

bool Lane::is_idle() const {
  const std::lock_guard lock(mutex_);
  return pending_.empty();
}

std::exception_ptr Lane::look(std::chrono::milliseconds timeout) {
  // A thread that asks a GPU something by another one, which it is on if nobody
  // says, takes hundreds of megabytes there.
  c10::OptionalDeviceGuard there;
  if (!device_.is_cpu()) there.reset_device(device_);
  std::exception_ptr unopened;
  {
    const std::lock_guard lock(mutex_);
    unopened = std::exchange(open_error_, nullptr);
  }
  while (const auto work = first()) {
    try {
      if (unopened) std::rethrow_exception(unopened);
      if (!work->look(timeout)) return nullptr;
    } catch (const std::exception&) {
      const auto error = std::current_exception();
      work->complete(error);
      return error;
    }
    const std::lock_guard lock(mutex_);
    // The lane may have been given up meanwhile.
    if (!pending_.empty() && pending_.front() == work) pending_.pop_front();
    changed_.notify_all();
  }
  return nullptr;
}

// The first reason stays.
void Lane::give_up(const std::exception_ptr& why) {
  std::deque<c10::intrusive_ptr<LaneWork>> left;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kGivenUp) why_ = why;
    state_ = State::kGivenUp;
    left.swap(pending_);
    kept_.clear();
  }
  for (const auto& work : left) work->complete(why);
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Lane::close(std::chrono::milliseconds timeout) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(
        lock, [&] { return pending_.empty() && state_ != State::kOpening; });
    if (state_ != State::kOpen) return;
    state_ = State::kGivenUp;
    why_ = error_of("its communicator was closed");
    has_channel_ = false;
  }
  try {
    if (ask_in_time([channel = channel_] { channel->close(); }, timeout)) {
      return;
    }
    log::warning("a communicator of NCCL was left open at the end");
  } catch (const std::exception& error) {
    log::warning("NCCL: ", message_of(error));
  }
}

Watch::Watch(std::chrono::milliseconds timeout) : timeout_(timeout) {}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Lane> Watch::make_lane(at::Device device,
                                       std::shared_ptr<Channel> channel) {
  auto lane = std::make_shared<Lane>(device, std::move(channel), *this);
  const std::lock_guard lock(mutex_);
  std::erase_if(lanes_, [](const auto& each) { return each.expired(); });
  lanes_.push_back(lane);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  return lane;
}

void Watch::wake() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(called_, true)) changed_.notify_all();
}

void Watch::loop() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    called_ = false;
    lock.unlock();
    const bool is_busy = look();
    lock.lock();
    if (is_busy) {
      changed_.wait_for(lock, kLook, [&] { return closing_; });
    } else {
      changed_.wait(lock, [&] { return closing_ || called_; });
    }
  }
}

bool Watch::look() {
  bool is_busy = false;
  for (const auto& lane : lanes()) {
    if (const auto error = lane->look(timeout_)) {
      give_up(error_of("it was given up, for another operation has failed"));
    }
    is_busy = is_busy || !lane->is_idle();
  }
  return is_busy;
}

std::vector<std::shared_ptr<Lane>> Watch::lanes() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Lane>> alive;
  for (const auto& each : lanes_) {
    if (auto lane = each.lock()) alive.push_back(std::move(lane));
  }
  return alive;
}

void Watch::fail(const std::string& why) { give_up(error_of(why)); }

void Watch::give_up(const std::exception_ptr& why) {
  const auto all = lanes();
  for (const auto& lane : all) lane->give_up(why);
  const auto abort = [all] {
    for (const auto& lane : all) {
      std::unique_lock lock(lane->mutex_);
      const bool is_open = std::exchange(lane->has_channel_, false);
      lock.unlock();
      if (is_open) lane->channel_->abort();
    }
  };
  try {
    if (ask_in_time(abort, kAbortPatience)) return;
    log::warning("NCCL does not give up what runs on the GPU");
  } catch (const std::exception& error) {
    log::warning("NCCL: ", message_of(error));
  }
}

}  // namespace tessera::comm::nccl
