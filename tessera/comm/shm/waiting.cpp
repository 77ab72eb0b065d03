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

constexpr int kYields = 20;
constexpr auto kYieldTime = std::chrono::microseconds(100);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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

int spins_for(int64_t ranks_on_host) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 0;
  return ranks_on_host <= CPU_COUNT(&cores) ? 2000 : 0;
}

void wait_until(Word& word, int spins, const std::function<bool()>& ready,
                const std::function<void()>& check) {
  for (int i = 0; i < spins; ++i) {
    if (ready()) return;
    relax();
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return;
    sched_yield();
    // Others keep the cores busy: a sleeper that is woken runs sooner.
    if (std::chrono::steady_clock::now() - begin > kYieldTime) break;
  }
  Sleeper sleeper(word);
  while (true) {
    const uint32_t seen = word.value.load();
    if (ready()) return;
    const timespec slice{0, kSliceMs * 1000000L};
    futex(word.value, FUTEX_WAIT, seen, &slice);
    if (!ready()) check();
  }
}

}  // namespace tessera::comm::shm
