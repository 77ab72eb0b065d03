// Waiting on a word of shared memory: spin, yield, then sleep (futex).
//
// Ranks that each have a core spin first; with more ranks than cores nobody
// spins, for the one that is waited for needs the core. Spinning that keeps
// failing (peers that compute for long, other programs on the cores) is given
// up by and by, and comes back with the first wait that was short.
// Posting costs no system call when nobody sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera::comm::shm {

// Written by one thread with post(), or by several with ring(). A cache line of
// its own, or the head of one.
struct Word {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Sets the word (one writer) and wakes who sleeps on it.
void post(Word& word, uint32_t value);
// Adds one (several writers) and wakes who sleeps on it.
void ring(Word& word);
// Wakes who sleeps on it although nothing was posted.
void wake_all(Word& word);
// Sleeps while the word is `seen`, for a slice at most, and does not count
// itself among the sleepers: it is woken where others are, or where somebody
// counts it.
void doze(Word& word, uint32_t seen, std::chrono::nanoseconds slice);

// A way of waiting. Threads: any.
class Waiter {
 public:
  // Only those who have a core to themselves may spin (cores.h).
  explicit Waiter(bool may_spin);

  static constexpr std::chrono::nanoseconds kSlice{100'000'000};

  // Returns once `ready()` holds; `word` changes whenever it may have come
  // true. `check()` is called about every `slice` while it sleeps, and when it
  // is woken for nothing: it throws to give up.
  template <typename Ready>
  void wait(Word& word, const Ready& ready, const std::function<void()>& check,
            std::chrono::nanoseconds slice = kSlice) {
    const int spins = spins_.load(std::memory_order_relaxed);
    for (int i = 0; i < spins; ++i) {
      if (ready()) return;
      relax();
    }
    if (!ready()) wait_longer(word, ready, check, slice);
  }

 private:
  static void relax();
  void wait_longer(Word& word, const std::function<bool()>& ready,
                   const std::function<void()>& check,
                   std::chrono::nanoseconds slice);
  static bool yield_until(const std::function<bool()>& ready);
  static void sleep_until(Word& word, const std::function<bool()>& ready,
                          const std::function<void()>& check,
                          std::chrono::nanoseconds slice);

  const int most_spins_;
  std::atomic<int> spins_;
};

// How long something has been waited for, by looks at it about every slice.
// Where two lie further apart, the job may have been stopped as a whole, and
// goes on: little of that time counts.
class Waited {
 public:
  using Clock = std::chrono::steady_clock;

  void reset() { *this = Waited(); }
  // From the first look to this one.
  Clock::duration look(Clock::time_point now) {
    if (looked_at_ != Clock::time_point()) {
      sum_ += std::min<Clock::duration>(now - looked_at_, 2 * Waiter::kSlice);
    }
    looked_at_ = now;
    return sum_;
  }

 private:
  Clock::time_point looked_at_ = {};
  Clock::duration sum_ = {};
};

}  // namespace tessera::comm::shm
