#include "tessera/comm/shm/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::comm::shm {
namespace {

constexpr int kMostSpins = 2000;  // about 50 us
constexpr int kYields = 20;
constexpr auto kYieldTime = std::chrono::microseconds(100);

// Not FUTEX_PRIVATE: the sleepers may be other processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation,
                 value, timeout, nullptr, 0);
}

class Sleeper {
 public:
  explicit Sleeper(Word& word) : word_(word) { word_.sleepers.fetch_add(1); }
  ~Sleeper() { word_.sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Word& word_;
};

}  // namespace

// The value is stored before `sleepers` is read, and a sleeper counts itself
// before it reads the value (both seq_cst): one of the two sees the other.
void post(Word& word, uint32_t value) {
  word.value.store(value);
  if (word.sleepers.load() != 0) wake_all(word);
}

void ring(Word& word) {
  word.value.fetch_add(1);
  if (word.sleepers.load() != 0) wake_all(word);
}

void wake_all(Word& word) { futex(word.value, FUTEX_WAKE, INT_MAX, nullptr); }

void doze(Word& word, uint32_t seen, std::chrono::nanoseconds slice) {
  constexpr long kSecond = 1'000'000'000;
  const timespec time{slice.count() / kSecond, slice.count() % kSecond};
  futex(word.value, FUTEX_WAIT, seen, &time);
}

Waiter::Waiter(bool may_spin)
    : most_spins_(may_spin ? kMostSpins : 0), spins_(most_spins_) {}

void Waiter::relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Waiter::wait_longer(Word& word, const std::function<bool()>& ready,
                         const std::function<void()>& check,
                         std::chrono::nanoseconds slice) {
  if (yield_until(ready)) {
    spins_ = most_spins_;
    return;
  }
  spins_ = spins_ / 2;
  sleep_until(word, ready, check, slice);
}

bool Waiter::yield_until(const std::function<bool()>& ready) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return true;
    sched_yield();
    // Others keep the cores busy: a sleeper that is woken runs sooner.
    if (std::chrono::steady_clock::now() - begin > kYieldTime) break;
  }
  return ready();
}

void Waiter::sleep_until(Word& word, const std::function<bool()>& ready,
                         const std::function<void()>& check,
                         std::chrono::nanoseconds slice) {
  Sleeper sleeper(word);
  while (true) {
    const uint32_t seen = word.value.load();
    if (ready()) return;
    doze(word, seen, slice);
    if (!ready()) check();
  }
}

}  // namespace tessera::comm::shm
