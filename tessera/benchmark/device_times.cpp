#include "tessera/benchmark/device_times.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "tessera/core/device.h"

namespace tessera::benchmark {
namespace {

namespace profiler = torch::autograd::profiler;
using Activity = torch::profiler::impl::ActivityType;

constexpr std::array<std::string_view, 7> kWaits = {"cudaStreamSynchronize",
                                                    "cudaDeviceSynchronize",
                                                    "cudaEventSynchronize",
                                                    "cuStreamSynchronize",
                                                    "cuCtxSynchronize",
                                                    "cudaMemcpy",
                                                    "cudaFree"};

// Kineto's: since the epoch.
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

int64_t calls_of(const std::vector<KernelTime>& all) {
  int64_t calls = 0;
  for (const KernelTime& each : all) calls += each.calls;
  return calls;
}

using ByName = std::map<std::string, KernelTime>;

void add(ByName& all, const profiler::KinetoEvent& event) {
  KernelTime& time = all[event.name()];
  ++time.calls;
  time.seconds += 1e-9 * static_cast<double>(event.durationNs());
}

}  // namespace

int64_t DeviceTimes::launches() const { return calls_of(kernels); }
int64_t DeviceTimes::num_waits() const { return calls_of(waits); }

DeviceTrace::DeviceTrace()
    : is_open_(at::detail::getCUDAHooks().getNumGPUs() > 0) {
  if (!is_open_) return;
  listened_ = c10::ThreadLocalDebugInfo::current();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  const std::set<Activity> of = {Activity::CUDA};
  profiler::prepareProfiler(config, of);
  profiler::enableProfiler(config, of);
  begin_ns_ = now_ns();
}

DeviceTrace::~DeviceTrace() {
  if (!is_open_) return;
  profiler::disableProfiler();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(listened_);
}

DeviceTimes DeviceTrace::taken() {
  if (!is_open_) return {};
  wait_for_device(c10::kCUDA);
  const auto result = profiler::disableProfiler();
  is_open_ = false;
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(listened_);
  DeviceTimes times;
  ByName kernels, waits;
  std::vector<std::pair<int64_t, int64_t>> spans;
  std::vector<const profiler::KinetoEvent*> waited;
  int64_t last_launch = 0;
  for (const auto& event : result->events()) {
    const auto begin = static_cast<int64_t>(event.startNs());
    if (begin < begin_ns_) continue;
    if (event.deviceType() == c10::kCUDA) {
      if (event.durationNs() == 0) continue;
      add(kernels, event);
      spans.emplace_back(begin, begin + event.durationNs());
    } else if (event.name().find("LaunchKernel") != std::string::npos) {
      last_launch = std::max(last_launch, begin);
    } else if (std::ranges::find(kWaits, event.name()) != kWaits.end()) {
      waited.push_back(&event);
    }
  }
  for (const auto* event : waited) {
    if (static_cast<int64_t>(event->startNs()) < last_launch) {
      add(waits, *event);
    }
  }
  times.kernels = by_length(kernels);
  times.waits = by_length(waits);
  std::ranges::sort(spans);
  int64_t busy = 0, until = 0;
  for (const auto& [begin, end] : spans) {
    busy += std::max<int64_t>(0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  if (!spans.empty()) {
    times.span_s = 1e-9 * static_cast<double>(until - spans.front().first);
  }
  times.busy_s = 1e-9 * static_cast<double>(busy);
  return times;
}

}  // namespace tessera::benchmark
