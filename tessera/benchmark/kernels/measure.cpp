#include "tessera/benchmark/kernels/measure.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::benchmark::kernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kFewestTimings = 3;
constexpr double kShortestTiming = 1e-3;
constexpr double kLongCall = 0.5;     // beside which a first use is nothing
constexpr int64_t kMostCalls = 1000;  // in a timing

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Side {
 public:
  Side(const std::function<void()>& run, double seconds) : run_(run) {
    const double first = timed(1);  // with what is made on first use
    if (first >= std::max(seconds, kLongCall)) {
      times_ = {first};
      calls_ = 0;
      return;
    }
    const double one = timed(1);
    calls_ = std::clamp<int64_t>(
        static_cast<int64_t>(std::ceil(kShortestTiming / std::max(one, 1e-9))),
        1, kMostCalls);
  }

  void take() {
    if (calls_ > 0) times_.push_back(timed(calls_));
  }

  double median() const {
    auto sorted = times_;
    const auto middle =
        sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
    std::ranges::nth_element(sorted, middle);
    return *middle;
  }

  int64_t timings() const { return static_cast<int64_t>(times_.size()); }

 private:
  double timed(int64_t calls) const {
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls; ++i) run_();
    return seconds_since(start) / static_cast<double>(calls);
  }

  const std::function<void()>& run_;
  int64_t calls_ = 1;          // in a timing; 0: no other is taken
  std::vector<double> times_;  // of a call
};

std::string name_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? "fp32" : "bf16";
}

}  // namespace

double ulps_between(const std::vector<at::Tensor>& found,
                    const std::vector<Reference>& wanted) {
  TORCH_INTERNAL_ASSERT(found.size() == wanted.size());
  double worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double unit =
        found[i].scalar_type() == at::kBFloat16 ? 0x1p-7 : 0x1p-23;
    const at::Tensor error =
        (found[i].detach().to(at::kDouble) - wanted[i].exact).abs();
    // A zero is wanted to the least of numbers.
    const at::Tensor ulps = error / (wanted[i].magnitude * unit +
                                     std::numeric_limits<float>::min());
    const double most = ulps.max().item<double>();
    if (!(most <= worst)) worst = most;
    if (std::isnan(worst)) return std::numeric_limits<double>::infinity();
  }
  return worst;
}

Row measure(const Contest& contest, double seconds) {
  Row row{.kernel = contest.kernel,
          .dtype = name_of(contest.dtype),
          .shape = contest.shape,
          .ulps = ulps_between(contest.found(), contest.wanted()),
          .bytes = contest.bytes,
          .flops = contest.flops};
  TS_CHECK(row.ulps <= contest.most_ulps, "bench: kernel ", row.kernel, " of ",
           row.dtype, ", ", row.shape, ", is off by ", row.ulps,
           " units of the last place, where ", contest.most_ulps,
           " are the most.");
  const auto start = Clock::now();
  Side ours(contest.ours, seconds), libtorch(contest.libtorch, seconds);
  for (size_t turn = 0; turn < kFewestTimings || seconds_since(start) < seconds;
       ++turn) {
    Side& first = turn % 2 == 0 ? ours : libtorch;
    Side& second = turn % 2 == 0 ? libtorch : ours;
    first.take();
    second.take();
  }
  row.seconds = ours.median();
  row.libtorch_seconds = libtorch.median();
  row.timings = ours.timings();
  return row;
}

}  // namespace tessera::benchmark::kernels
