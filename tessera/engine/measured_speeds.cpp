#include "tessera/engine/measured_speeds.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "tessera/core/device.h"

namespace tessera::engine {
namespace {

// Products a second: means, as a share of a core comes in slices.
double product_rate(at::Device device, std::chrono::duration<double> during) {
  // A product that takes much longer than to start it and to hear of its end.
  const int64_t size = device.is_cuda() ? 4096 : 256;
  const at::Tensor a = at::ones({size, size}, device), b = a.clone();
  at::Tensor c = at::mm(a, b);
  wait_for_device(device);
  const auto start = std::chrono::steady_clock::now();
  std::chrono::duration<double> passed{0};
  int64_t count = 0;
  while (passed < during) {
    at::mm_out(c, a, b);
    wait_for_device(device);
    ++count;
    passed = std::chrono::steady_clock::now() - start;
  }
  return static_cast<double>(count) / passed.count();
}

}  // namespace

std::vector<double> rounded_speeds(const std::vector<double>& rates) {
  constexpr double kSteps = 10;
  const double fastest = std::ranges::max(rates);
  const auto is_fast = [&](double rate) {
    return rate >= fastest * (1 - 1 / kSteps);
  };
  if (std::ranges::all_of(rates, is_fast)) return {};
  std::vector<double> speeds;
  for (const double rate : rates) {
    speeds.push_back(std::max(1.0, std::round(kSteps * rate / fastest)) /
                     kSteps);
  }
  return speeds;
}

std::vector<double> measured_speeds(comm::Communicator& ranks,
                                    at::Device device) {
  constexpr std::chrono::duration<double> kRound{0.1};
  comm::Group& world = ranks.world();
  std::array<double, 3> rates{};
  for (double& rate : rates) {
    world.barrier();
    rate = product_rate(device, kRound);
  }
  std::ranges::sort(rates);
  at::Tensor mine = at::full({1}, rates[rates.size() / 2], at::kDouble);
  at::Tensor all = at::empty({world.size()}, at::kDouble);
  world.all_gather(all, mine).synchronize();
  const double* const first = all.const_data_ptr<double>();
  return rounded_speeds({first, first + all.numel()});
}

}  // namespace tessera::engine
