#include "tessera/core/processor.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <limits>
#include <thread>
#include <vector>

namespace tessera {
namespace {

constexpr int kBatches = 10;
constexpr int kTripsABatch = 400;

// A rank that its launcher bound to one core may still try another.
std::vector<int> two_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE && cores.size() < 2; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  for (int core = 0; core < online && cores.size() == 1; ++core) {
    if (core != cores.front()) cores.push_back(core);
  }
  return cores;
}

// False where the system refuses.
bool pin_this_thread(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  return sched_setaffinity(0, sizeof only, &only) == 0;
}

// A counter on a line of its own: odd is the one's turn, even the other's.
struct alignas(128) Ball {
  std::atomic<int> count = 0;

  void await(int value) const {
    while (count.load(std::memory_order_acquire) != value) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
  void hit(int value) { count.store(value, std::memory_order_release); }
};

double fastest_trip_ns(Ball& ball) {
  using Clock = std::chrono::steady_clock;
  double fastest = std::numeric_limits<double>::max();
  for (int batch = 0, count = 0; batch < kBatches; ++batch) {
    const auto start = Clock::now();
    for (int trip = 0; trip < kTripsABatch; ++trip, count += 2) {
      ball.hit(count + 1);
      ball.await(count + 2);
    }
    const std::chrono::duration<double, std::nano> took = Clock::now() - start;
    fastest = std::min(fastest, took.count() / kTripsABatch);
  }
  return fastest;
}

void send_back(Ball& ball) {
  for (int count = 0; count < 2 * kBatches * kTripsABatch; count += 2) {
    ball.await(count + 1);
    ball.hit(count + 2);
  }
}

}  // namespace

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) {
      return line.substr(colon + 2);
    }
  }
  return "an unknown processor";
}

bool is_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

std::optional<double> cache_line_round_trip_ns() {
  const std::vector<int> cores = two_cores();
  if (cores.size() < 2) return std::nullopt;
  Ball ball;
  double trip_ns = 0;
  std::atomic<bool> pinned = true;
  std::thread one([&] {
    if (!pin_this_thread(cores[0])) pinned = false;
    trip_ns = fastest_trip_ns(ball);
  });
  std::thread other([&] {
    if (!pin_this_thread(cores[1])) pinned = false;
    send_back(ball);
  });
  one.join();
  other.join();
  if (!pinned) return std::nullopt;
  return trip_ns;
}

}  // namespace tessera
