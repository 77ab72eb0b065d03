// What the operators of LibTorch and the kernels of nn took on a thread, each
// without those that it called: while a KernelTimes lives, by name.
//
// Cost: about a microsecond an operator: not beside what is timed whole.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::benchmark {

struct KernelTime {
  std::string name;  // "aten::add_"
  int64_t calls = 0;
  double seconds = 0;
};

// The longest first.
std::vector<KernelTime> by_length(
    const std::map<std::string, KernelTime>& by_name);

class KernelTimes {
 public:
  KernelTimes();
  ~KernelTimes();
  KernelTimes(const KernelTimes&) = delete;
  KernelTimes& operator=(const KernelTimes&) = delete;

  // The longest first.
  static std::vector<KernelTime> taken();

 private:
  at::CallbackHandle handle_;
};

}  // namespace tessera::benchmark
