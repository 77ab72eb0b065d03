#include "tessera/nn/kernel_choice.h"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <sstream>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

using Kernels = std::bitset<kKernelNames.size()>;

Kernels left_out() {
  const char* const value = std::getenv("TESSERA_WITHOUT_KERNELS");
  Kernels kernels;
  std::istringstream list(value ? value : "");
  for (std::string name; std::getline(list, name, ',');) {
    std::erase(name, ' ');
    const auto* const found = std::ranges::find(kKernelNames, name);
    std::ostringstream all;
    for (const char* each : kKernelNames) all << ' ' << each;
    TS_CHECK_CONFIG(
        found != kKernelNames.end(), "TESSERA_WITHOUT_KERNELS names \"", name,
        "\", which is no kernel that can be left out. There are:", all.str(),
        ".");
    kernels.set(static_cast<size_t>(found - kKernelNames.begin()));
  }
  return kernels;
}

}  // namespace

bool uses(Kernel kernel) {
  static const Kernels without = left_out();
  return !without.test(static_cast<size_t>(kernel));
}

}  // namespace tessera::nn
