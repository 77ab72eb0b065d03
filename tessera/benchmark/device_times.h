// What a GPU did while a DeviceTrace lived: its kernels and copies by name, how
// long it had none of them, and how often the host waited for it. By LibTorch's
// profiler (Kineto, CUPTI).
//
// Processes: all of this one's work on GPUs, whichever thread began it.
// Cost:      a few microseconds for each launch.
// Where LibTorch has no CUDA nothing is traced.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/benchmark/kernel_times.h"

namespace tessera::benchmark {

struct DeviceTimes {
  std::vector<KernelTime> kernels;  // and copies; the longest first
  // From the first one's begin to the last one's end; in it, with one or more.
  double span_s = 0, busy_s = 0;
  // Calls by which the host waits until the GPU is done, by name, before the
  // last kernel is launched: behind it the GPU waits for nothing.
  std::vector<KernelTime> waits;

  int64_t launches() const;
  int64_t num_waits() const;
};

class DeviceTrace {
 public:
  DeviceTrace();
  ~DeviceTrace();
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  // Ends it. Whoever asks has not waited for the device inside of it.
  DeviceTimes taken();

 private:
  bool is_open_ = false;
  int64_t begin_ns_ = 0;
  // Of whoever listens on this thread meanwhile not: monitor's DeviceMemory.
  std::shared_ptr<c10::ThreadLocalDebugInfo> listened_;
};

}  // namespace tessera::benchmark
