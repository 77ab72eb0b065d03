#include "tessera/data/detail/progress.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tessera/core/log.h"
#include "tessera/core/units.h"

namespace tessera::data::detail {
namespace {

constexpr double kBetweenLines = 5;  // seconds

double steady_seconds() {
  using std::chrono::duration;
  return duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Progress::Progress(std::string what, std::function<double()> clock)
    : what_(std::move(what)),
      clock_(clock ? std::move(clock) : steady_seconds),
      start_(clock_()),
      told_(start_) {}

void Progress::tell(double done, double total,
                    const std::function<std::string()>& words) {
  if (done <= 0 || clock_() - told_ < kBetweenLines) return;
  told_ = clock_();
  const double left = seconds() * (total - done) / done;
  log::info(what_, ": ", words(), " (", static_cast<int>(100 * done / total),
            "%), ", seconds_text(std::max(left, 0.0)), " left");
}

double Progress::seconds() const { return clock_() - start_; }

}  // namespace tessera::data::detail
