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

// Of the way from start_lr to lr, by the logarithm.
double log_share(int64_t step, int64_t warmup) {
  if (warmup <= 1) return 1.0;
  return 1.0 / std::log(static_cast<double>(warmup)) *
         std::log(static_cast<double>(step + 1));
}

double warm_up(int64_t step, double lr, const ScheduleConfig& schedule) {
  const double range = lr - schedule.start_lr;
  if (schedule.warmup_type == "log") {
    return schedule.start_lr + range * log_share(step, schedule.warmup);
  }
  return schedule.start_lr + range * static_cast<double>(step + 1) /
                                 static_cast<double>(schedule.warmup);
}

// In the order of DeepSpeed's own operations.
double lr_as_deepspeed(RunPosition at, double lr,
                       const ScheduleConfig& schedule) {
  const int64_t index = at.step - 1;
  const int64_t warmup = std::max<int64_t>(2, schedule.warmup);
  const bool cosine = schedule.type == "cosine";
  if (index < 0) return cosine ? 0.0 : schedule.start_lr;
  if (index < warmup) {
    const double share =
        schedule.warmup_type == "log"
            ? log_share(index, warmup)
            : static_cast<double>(index) / static_cast<double>(warmup);
    return schedule.start_lr + (lr - schedule.start_lr) * share;
  }
  if (schedule.type == "constant") return lr;
  const double range = lr - schedule.min_lr;
  const auto falling =
      static_cast<double>(std::max<int64_t>(1, at.steps - warmup));
  if (!cosine) {
    const double left = static_cast<double>(at.steps - index) / falling;
    return schedule.min_lr + range * std::max(0.0, left);
  }
  const double progress =
      std::min(1.0, static_cast<double>(index - warmup + 1) / falling);
  return schedule.min_lr +
         range * ((1.0 + std::cos(std::numbers::pi * progress)) / 2.0);
}

}  // namespace

double lr_at(RunPosition at, double lr, const ScheduleConfig& schedule) {
  const int64_t warmup = schedule.warmup;
  if (schedule.steps > 0) at.steps = schedule.steps;
  if (schedule.convention == "deepspeed") {
    return lr_as_deepspeed(at, lr, schedule);
  }
  if (at.step < warmup) return warm_up(at.step, lr, schedule);
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
