#include "tessera/comm/mpi/progress.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>

#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm::mpi {
namespace {

using Clock = std::chrono::steady_clock;

// What moves, moves at least so fast: a thread that waits for it only yields,
// for it is MPI's thread too, and copies. Beyond that it naps.
constexpr double kBytesPerSecond = 500e6;
constexpr auto kPatience = std::chrono::milliseconds(1);
constexpr auto kNap = std::chrono::microseconds(50);
// What is done here may still be on its way: MPI is called now and then for a
// while after the last operation.
constexpr auto kBetweenNudges = std::chrono::milliseconds(10);
constexpr auto kNudged = std::chrono::seconds(1);

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

}  // namespace

std::shared_ptr<Channel> Channel::open(const std::vector<int64_t>& ranks,
                                       uint64_t name,
                                       std::chrono::milliseconds timeout,
                                       int64_t largest_count) {
  std::shared_ptr<Channel> channel(new Channel(timeout));
  Progress& progress = Progress::of_process();
  progress.call([&] {
    channel->comm_ = std::make_unique<Comm>(ranks, name, largest_count);
    ++progress.open_channels_;
  });
  return channel;
}

void Channel::submit(Job job) {
  Progress::of_process().post(
      [self = shared_from_this(), job = std::move(job)]() mutable {
        self->add(std::move(job));
      });
}

void Channel::fail(const std::string& why) {
  Progress::of_process().post([self = shared_from_this(), why] {
    try {
      C10_THROW_ERROR(DistBackendError, why);
    } catch (const std::exception&) {
      self->abandon(std::current_exception());
    }
  });
}

void Channel::wait() {
  Progress& progress = Progress::of_process();
  const auto is_idle = [&] {
    bool idle = true;
    progress.call([&] { idle = this->is_idle() && waiting_.empty(); });
    return idle;
  };
  while (!is_idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Channel::close() {
  wait();
  Progress& progress = Progress::of_process();
  progress.call([&] {
    comm_.reset();
    --progress.open_channels_;
  });
  progress.end_if_idle(/*process_ends=*/false);
}

void Channel::add(Job job) {
  if (failure_) return job.work->complete(failure_);
  auto& busy = Progress::of_process().busy_;
  if (std::find(busy.begin(), busy.end(), shared_from_this()) == busy.end()) {
    busy.push_back(shared_from_this());
  }
  if (!job.is_message) {
    waiting_.push_back(std::move(job));
    return begin_next();
  }
  messages_.push_back({.job = std::move(job)});
  begin(messages_.back());
}

void Channel::begin_next() {
  if (collective_ || waiting_.empty()) return;
  collective_.emplace(Running{.job = std::move(waiting_.front())});
  waiting_.pop_front();
  begin(*collective_);
}

void Channel::begin(Running& running) {
  running.begun = Clock::now();
  try {
    running.job.post(*comm_, running.requests);
  } catch (const std::exception&) {
    abandon(std::current_exception());
  }
}

bool Channel::advance(Running& running) {
  if (running.requests.test()) {
    if (running.job.finish) running.job.finish(running.requests);
    return true;
  }
  if (Clock::now() - running.begun > timeout_) {
    C10_THROW_ERROR(DistBackendError,
                    "timed out (MPI does not tell which ranks are missing)");
  }
  return false;
}

bool Channel::advance() {
  bool moved = false;
  try {
    for (auto message = messages_.begin(); message != messages_.end();) {
      const auto next = std::next(message);
      if (advance(*message)) {
        const auto work = message->job.work;
        messages_.erase(message);
        work->complete(nullptr);
        moved = true;
      }
      message = next;
    }
    if (collective_ && advance(*collective_)) {
      const auto work = collective_->job.work;
      collective_.reset();
      work->complete(nullptr);
      moved = true;
      begin_next();
    }
  } catch (const std::exception&) {
    abandon(std::current_exception());
  }
  return moved;
}

void Channel::abandon(const std::exception_ptr& error) {
  if (failure_) return;
  failure_ = error;
  Progress::of_process().failed_ = true;
  keep_for_ever(comm_.release());
  std::vector<c10::intrusive_ptr<PendingWork>> works;
  const auto give_up = [&](Running& running) {
    works.push_back(running.job.work);
    keep_for_ever(new Running(std::move(running)));
  };
  if (collective_) give_up(*collective_);
  for (Running& message : messages_) give_up(message);
  for (Job& job : waiting_) works.push_back(job.work);
  collective_.reset();
  messages_.clear();
  waiting_.clear();
  for (const auto& work : works) work->complete(failure_);
}

int64_t Channel::bytes_under_way() const {
  int64_t bytes = collective_ ? collective_->job.bytes : 0;
  for (const Running& message : messages_) bytes += message.job.bytes;
  return bytes;
}

// Never destroyed: a communicator may be a global variable, and be closed after
// the variables that were made after it.
Progress& Progress::of_process() {
  static Progress& progress = *new Progress;
  return progress;
}

Progress::Progress() : thread_([this] { loop(); }) {
  std::atexit([] { of_process().end_if_idle(/*process_ends=*/true); });
}

void Progress::end_if_idle(bool process_ends) {
  bool is_time = false;
  call([&] {
    process_ends_ = process_ends_ || process_ends;
    is_time = process_ends_ && (failed_ || open_channels_ == 0);
  });
  if (!is_time) return;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

World Progress::world() {
  World world;
  call([&] {
    if (!world_) world_ = start();
    world = *world_;
  });
  return world;
}

bool Progress::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return false;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
  return true;
}

void Progress::call(std::function<void()> task) {
  auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  auto done = packaged->get_future();
  if (post([packaged] { (*packaged)(); })) done.get();
}

// False when the process ends.
bool Progress::take_tasks(std::vector<std::function<void()>>& tasks,
                          std::chrono::milliseconds sleep) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, sleep, [&] { return ended_ || !tasks_.empty(); });
  tasks.swap(tasks_);
  return !tasks.empty() || !ended_;
}

bool Progress::advance_channels() {
  bool moved = false;
  // By index: what is completed here may submit more.
  for (size_t i = 0; i < busy_.size(); ++i) moved |= busy_[i]->advance();
  std::erase_if(busy_, [](const auto& channel) { return channel->is_idle(); });
  return moved;
}

void Progress::pause(Clock::time_point moved) const {
  int64_t bytes = 0;
  for (const auto& channel : busy_) bytes += channel->bytes_under_way();
  const double patience = std::chrono::duration<double>(kPatience).count() +
                          static_cast<double>(bytes) / kBytesPerSecond;
  if (busy_.empty() || seconds_since(moved) < patience) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
}

// A program that started MPI may end it, or call it itself, when its channels
// are closed.
bool Progress::may_nudge() const {
  return busy_.empty() && world_ &&
         (world_->started_here || open_channels_ > 0);
}

std::chrono::milliseconds Progress::sleep_after(Clock::time_point moved) const {
  // After an operation the next one is often near: no sleep at once.
  const auto idle = Clock::now() - moved;
  if (!busy_.empty() || idle < kNap) return std::chrono::milliseconds(0);
  return may_nudge() && idle < kNudged ? kBetweenNudges : std::chrono::hours(1);
}

void Progress::loop() {
  std::vector<std::function<void()>> tasks;
  auto moved = Clock::now();
  while (take_tasks(tasks, sleep_after(moved))) {
    if (advance_channels() || !tasks.empty()) moved = Clock::now();
    for (auto& task : tasks) task();
    tasks.clear();
    if (may_nudge()) nudge();
    pause(moved);
  }
  if (!world_ || !world_->started_here) return;
  if (!failed_) return stop();
  log::warning(
      "MPI was not ended, behind a failure of its collectives: "
      "mpirun may say so too");
}

}  // namespace tessera::comm::mpi
