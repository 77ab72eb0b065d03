#include "tessera/comm/shm/messages.h"

#include "tessera/core/error.h"

namespace tessera::comm::shm {

Messages::Messages(Segment& segment,
                   std::function<void(const std::string&)> on_failure,
                   int64_t lend_bytes)
    : bell_(segment.own_lane().bell),
      waiter_(segment.ranks_have_cores()),
      on_failure_(std::move(on_failure)),
      mailbox_(
          segment,
          // Told when it is not busy any more.
          [this](Transfer transfer, const std::exception_ptr& error) {
            const std::lock_guard lock(mutex_);
            done_.emplace_back(std::move(transfer), error);
          },
          lend_bytes) {}

void Messages::submit(Transfer transfer) {
  {
    const std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(transfer));
    pending_ = true;
  }
  advance();
}

void Messages::run_until_done(PendingWork& work) {
  advance_until([&] { return work.isCompleted(); });
}

void Messages::close() {
  advance_until([&] { return !pending_; });
  closed_ = true;
  ring(bell_);
  wake_all(bell_);
  if (thread_.joinable()) thread_.join();
  while (visitors_ > 0) std::this_thread::yield();
}

template <typename Done>
void Messages::advance_until(const Done& done) {
  ++visitors_;
  ++waiters_;
  while (!closed_) {
    const uint32_t seen = bell_.value.load();
    advance();
    if (done()) break;
    const auto wanted = [&] {
      return bell_.value.load() != seen ||
             mailbox_.patience() <= std::chrono::nanoseconds::zero();
    };
    waiter_.wait(
        bell_, wanted, [&] { advance(/*looks=*/true); }, mailbox_.patience());
  }
  // The thread goes on with what is left.
  if (--waiters_ == 0 && pending_ && !closed_) advance();
  --visitors_;
}

void Messages::loop() {
  bool looks = false;
  while (!closed_) {
    const uint32_t seen = bell_.value.load();
    if (waiters_ == 0) advance(looks);
    doze(bell_, seen, mailbox_.patience());
    looks = bell_.value.load() == seen;
  }
}

// All of these are in one order: who finds it busy is heard by the one who is.
void Messages::advance(bool looks) {
  if (looks) looks_ = true;
  again_ = true;
  while (again_) {
    if (busy_.exchange(true)) return;
    again_ = false;
    try {
      step();
      count_thread();
    } catch (const std::exception&) {
      fail(std::current_exception());
    }
    const bool was_pending = update_pending();
    busy_ = false;
    // Only now: what hears of it may call back.
    const bool told = tell_done();
    const bool changed = told || (was_pending && !pending_);
    if (changed && waiters_ > 0) ring(bell_);
  }
}

void Messages::step() {
  take_submitted();
  if (mailbox_.progress()) {
    again_ = true;
    return;
  }
  const auto now = Clock::now();
  if (!looks_.exchange(false) && now - looked_at_ < Waiter::kSlice) return;
  looked_at_ = now;
  if (mailbox_.pending()) mailbox_.check_peers();
}

void Messages::take_submitted() {
  std::vector<Transfer> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(submitted_);
  }
  for (Transfer& transfer : taken) mailbox_.take(std::move(transfer));
}

// Returns what it was.
bool Messages::update_pending() {
  const std::lock_guard lock(mutex_);
  return pending_.exchange(mailbox_.pending() || !submitted_.empty());
}

// One by one: what hears of one may wait for the next. False: there was none.
bool Messages::tell_done() {
  bool told = false;
  while (true) {
    std::unique_lock lock(mutex_);
    if (done_.empty()) return told;
    const auto [transfer, error] = std::move(done_.front());
    done_.pop_front();
    lock.unlock();
    transfer.work->complete(error);
    told = true;
  }
}

// Whoever rang before the thread was counted has not woken it: one more look.
void Messages::count_thread() {
  const bool counts = waiters_ == 0 && mailbox_.pending();
  if (counts == thread_counts_) return;
  if (counts && !thread_.joinable()) {
    thread_ = std::thread([this] { loop(); });
  }
  thread_counts_ = counts;
  bell_.sleepers.fetch_add(counts ? 1 : -1);
  if (counts) again_ = true;
}

void Messages::fail(const std::exception_ptr& error) {
  if (!mailbox_.has_failed()) {
    mailbox_.fail(error);
    on_failure_(message_of(error));
  }
  take_submitted();
}

}  // namespace tessera::comm::shm
