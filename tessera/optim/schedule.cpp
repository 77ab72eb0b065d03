#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

// The share of the way from lr down to min_lr that the wsd schedule has gone.
double wsd_decay(RunPosition at, const ScheduleConfig& schedule) {
  constexpr double kRounding = 1e-9;  // 0.2 of 35 steps are 7, not 8
  const auto share = static_cast<int64_t>(std::ceil(
      schedule.decay * static_cast<double>(at.steps) * (1 - kRounding)));
  const int64_t decay_steps = std::min(share, at.steps - schedule.warmup);
  const int64_t first = at.steps - decay_steps;
  if (at.step < first) return 0.0;
  return static_cast<double>(at.step - first + 1) /
         static_cast<double>(decay_steps);
}

}  // namespace

double lr_at(RunPosition at, double lr, const ScheduleConfig& schedule) {
  const int64_t warmup = schedule.warmup;
  if (schedule.steps > 0) at.steps = schedule.steps;
  if (at.step < warmup) {
    return lr * static_cast<double>(at.step + 1) / static_cast<double>(warmup);
  }
  if (schedule.type == "constant") return lr;
  if (at.step >= at.steps) return schedule.min_lr;
  const double progress = static_cast<double>(at.step - warmup) /
                          static_cast<double>(at.steps - warmup);
  const double range = lr - schedule.min_lr;
  if (schedule.type == "linear") {
    return schedule.min_lr + range * (1.0 - progress);
  }
  if (schedule.type == "cosine") {
    return schedule.min_lr +
           range * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  }
  TS_CHECK_CONFIG(schedule.type == "wsd", "schedule.type '", schedule.type,
                  "' is unknown. Use constant, linear, cosine or wsd.");
  return schedule.min_lr + range * (1.0 - wsd_decay(at, schedule));
}

}  // namespace tessera::optim
