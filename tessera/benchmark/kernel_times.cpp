#include "tessera/benchmark/kernel_times.h"

#include <algorithm>
#include <chrono>

namespace tessera::benchmark {
namespace {

using Clock = std::chrono::steady_clock;

// Of this thread. Names live as long as operators do.
struct Open {
  Clock::time_point begin;
  double inside = 0;  // of what it called
};
thread_local std::vector<Open> open;
thread_local std::map<std::string, KernelTime> times;

// "autograd::engine::evaluate_function: torch::autograd::CppNode<A::Glu>"
// becomes "backward of Glu".
std::string short_name(const std::string& name) {
  const std::string node = "evaluate_function: ";
  const size_t begin = name.find(node);
  if (begin == std::string::npos) return name;
  std::string of = name.substr(begin + node.size());
  if (of.ends_with('>')) of.pop_back();
  const size_t scope = of.rfind("::");
  return "backward of " +
         (scope == std::string::npos ? of : of.substr(scope + 2));
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) {
  open.push_back({.begin = Clock::now()});
  return nullptr;
}

void end(const at::RecordFunction& function, at::ObserverContext*) {
  if (open.empty()) return;  // it began before
  const Open own = open.back();
  open.pop_back();
  const double whole =
      std::chrono::duration<double>(Clock::now() - own.begin).count();
  if (!open.empty()) open.back().inside += whole;
  KernelTime& time = times[function.name()];
  ++time.calls;
  time.seconds += whole - own.inside;
}

}  // namespace

KernelTimes::KernelTimes()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&begin, &end)
              .scopes({at::RecordScope::FUNCTION}))) {
  open.clear();
  times.clear();
}

KernelTimes::~KernelTimes() { at::removeCallback(handle_); }

std::vector<KernelTime> KernelTimes::taken() {
  std::vector<KernelTime> all = by_length(times);
  for (KernelTime& each : all) each.name = short_name(each.name);
  return all;
}

std::vector<KernelTime> by_length(
    const std::map<std::string, KernelTime>& by_name) {
  std::vector<KernelTime> all;
  for (const auto& [name, time] : by_name) {
    all.push_back(time);
    all.back().name = name;
  }
  std::ranges::sort(all, std::ranges::greater{}, &KernelTime::seconds);
  return all;
}

}  // namespace tessera::benchmark
