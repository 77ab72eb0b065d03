// Waiting on a word of shared memory: spin, yield, then sleep (futex).
//
// Ranks that each have a core spin first; with more ranks than cores nobody
// spins, for the one that is waited for needs the core.
// Posting costs no system call when nobody sleeps.
#pragma once

#include <atomic>
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

// How often to spin before yielding, for this many ranks on this host.
int spins_for(int64_t ranks_on_host);

// Returns once `ready()` holds; `word` changes whenever it may have come true.
// `check()` is called about every kSliceMs while it sleeps, and when it is
// woken for nothing: it throws to give up.
inline constexpr int kSliceMs = 20;
void wait_until(Word& word, int spins, const std::function<bool()>& ready,
                const std::function<void()>& check);

}  // namespace tessera::comm::shm
